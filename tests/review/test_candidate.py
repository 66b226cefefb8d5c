"""Candidates: what is in one, and merges that would not run."""

import sys
from pathlib import Path

import pytest
from overlay.errors import OverlayError
from overlay.pin import PACKAGE
from review import verdict
from review.verdict import Review
from support import reviews
from support.series import BASE, CHANGES, OTHER, PATH, RUNNER, replaced

WAIT = ("        self.wait()\n", "        readiness.note(self, chosen)\n")
HEAD = ("LIMIT = 8\n", "LIMIT = 8\n\n\ndef note():\n    return 1\n")

#: The patch's edit, the release's edits, and what is wrong with the merge of both.
CASES: dict[str, tuple[tuple[str, str], list[tuple[str, str]], str]] = {
    "a constant was renamed": (
        ("        total = sum(self.rows)\n", "        total = sum(self.rows[:LIMIT])\n"),
        [("LIMIT = 8\n", "BOUND = 8\n")],
        "LIMIT",
    ),
    "a function became a class": (
        ("        self.rows.remove(row)\n",
         "        self.rows.remove(row)\n        return True\n"),
        [("    def drop(self, row):\n", "    rows, row = [1], 1\n\n    class drop:\n")],
        "return",
    ),
    "a method that both have": (
        ("    def prepare(self, rows):\n", "    def note(self):\n        return 1\n\n"
         "    def prepare(self, rows):\n"),
        [("        return total\n", "        return total\n\n    def note(self):\n"
          "        return 2\n")],
        "note",
    ),
    "the same change in both": (HEAD, [HEAD], ""),
    "the release's own fault": (
        WAIT,
        [("        return total\n", "        return totals\n"),
         ("LIMIT = 8\n", "LIMIT = 8\nimport os\nimport os\n")],
        "",  # nor has the patch's own, which does not import readiness
    ),
}  # fmt: skip


def reviewed(root: Path, ours: tuple[str, str], theirs: list[tuple[str, str]]) -> Review:
    release = reviews.release(text=replaced(RUNNER, *theirs))
    return reviews.reviewed(root, release, edits=(ours,))


@pytest.mark.parametrize("name", CASES)
def test_what_merges_and_would_not_run_is_found(name: str, tmp_path: Path) -> None:
    ours, theirs, expected = CASES[name]
    result = reviewed(tmp_path, ours, theirs)
    assert result.conflicts == []
    faults = [each for each in result.decisions if "the candidate is not ready" in each]
    assert len(faults) == bool(expected)
    assert all(expected in fault and f"{PATH}, line " in fault for fault in faults)
    pin = tmp_path / "out" / "0.23.0" / "candidate" / "VERSION_PIN"
    assert pin.exists() is bool(result.candidate) is not bool(faults)


def test_without_ruff_nothing_is_said_to_be_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OverlayError, match="ruff cannot be run"):
        reviewed(tmp_path, HEAD, [])


def test_an_obsolete_patch_is_left_out(tmp_path: Path) -> None:
    release = reviews.release(text=CHANGES["our own change"].edit(RUNNER))
    result = reviews.reviewed(tmp_path, release)
    listed = result.candidate["patches/series"].decode().split()
    assert listed == ["0001-edit-2.patch", "0002-edit-3.patch"]
    assert f"{release.sha256}  {release.wheel}".encode() in result.candidate["VERSION_PIN"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({OTHER: "", PATH.replace(".py", "/__init__.py"): RUNNER}, f"{PATH}: it is gone"),
        ({**BASE, f"{PACKAGE}/__init__.py": "READY = 1\n"}, f"puts its own, {PACKAGE}"),
        ({**BASE, f"{PACKAGE}.py": "READY = 1\n"}, f"puts its own, {PACKAGE}"),
        ({**BASE, f"{PACKAGE}_check.py": "READY = 1\n"}, ""),
    ],
)
def test_a_release_without_a_patched_file_or_with_our_package(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    result = reviews.reviewed(tmp_path, reviews.release(files))
    assert any(said in each for each in result.decisions) is bool(said)
    assert bool(result.candidate) is not bool(said)
    assert (result.verdict == verdict.UNCHANGED) is not bool(said)
