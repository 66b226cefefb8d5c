"""Candidates that merge, and would not run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from review import review
from review.wheels import Release
from support import series
from support.series import BASE, PATH, RUNNER, replaced

WAIT = ("        self.wait()\n", "        readiness.note(self, chosen)\n")
HEAD = ("LIMIT = 8\n", "LIMIT = 8\n\n\ndef note():\n    return 1\n")

#: The patch's edit, the release's edits, and what is wrong with the merge of both.
CASES: dict[str, tuple[tuple[str, str], list[tuple[str, str]], list[tuple[str, str]]]] = {
    "a variable was renamed": (
        ("        return chosen\n", "        return chosen + min(logits)\n"),
        [("    def sample(self, logits):\n        self.prepare(logits)\n"
          "        chosen = max(logits)\n",
          "    def sample(self, scores):\n        self.prepare(scores)\n"
          "        chosen = max(scores)\n")],
        [("name", "logits")],
    ),
    "a module's constant was renamed": (
        ("        total = sum(self.rows)\n", "        total = sum(self.rows[:LIMIT])\n"),
        [("LIMIT = 8\n", "BOUND = 8\n")],
        [("name", "LIMIT")],
    ),
    "a function became a class": (
        ("        self.rows.remove(row)\n",
         "        self.rows.remove(row)\n        return True\n"),
        [("    def drop(self, row):\n", "    rows, row = [1], 1\n\n    class drop:\n")],
        [("syntax", "")],
    ),
    "an import that both have": (
        ('"""Runs."""\n', '"""Runs."""\n\nimport logging\n'),
        [("LIMIT = 8\n", "LIMIT = 8\nimport logging\n")],
        [("collision", "logging")],
    ),
    "a function that both have": (
        HEAD,
        [("    def finish(self):\n        total = sum(self.rows)\n        return total\n",
          "    def finish(self):\n        total = sum(self.rows)\n        return total\n\n\n"
          "def note():\n    return 2\n")],
        [("collision", "note")],
    ),
    "a method that both have": (
        ("    def prepare(self, rows):\n", "    def note(self):\n        return 1\n\n"
         "    def prepare(self, rows):\n"),
        [("        return total\n", "        return total\n\n    def note(self):\n"
          "        return 2\n")],
        [("collision", "note")],
    ),
    "an attribute that both set": (
        ("        self.rows = []\n", "        self.rows = []\n        self.notes = []\n"),
        [("        return total\n", "        self.notes = {}\n        return total\n")],
        [("collision", "notes")],
    ),
    "a variable that both set": (
        ("        self.prepare(logits)\n", "        note = self.prepare(logits)\n"),
        [("        return chosen\n", "        note = chosen\n        return note\n")],
        [("collision", "note")],
    ),
    "the same change in both": (
        HEAD, [HEAD], [],
    ),
    "the release's own fault": (
        WAIT,
        [("        return total\n", "        return totals\n"),
         ("LIMIT = 8\n", "LIMIT = 8\nimport os\nimport os\n")],
        [],  # nor has the patch's own, which does not import readiness
    ),
    "a name that the base defines": (
        ("LIMIT = 8\n", "LIMIT = 8\nLIMIT += 1\n"),
        [("        return total\n", "        return total + LIMIT\n")],
        [],
    ),
}  # fmt: skip


def reviewed(root: Path, ours: tuple[str, str], theirs: list[tuple[str, str]]) -> dict[str, Any]:
    overlay = series.checkout(root / "checkout", (ours,))
    text = replaced(RUNNER, *theirs)
    release = Release(
        "0.23.0", "w.whl", "a" * 64, "a test's", series.upstream({**BASE, PATH: text})
    )
    return review.of_release(overlay, series.upstream(BASE), release, root / "out", (), mends={})


@pytest.mark.parametrize("name", CASES)
def test_what_merges_and_would_not_run_is_found(name: str, tmp_path: Path) -> None:
    ours, theirs, expected = CASES[name]
    result = reviewed(tmp_path, ours, theirs)
    assert "conflicts" not in {patch["verdict"] for patch in result["patches"]}
    found = [(each["kind"], each["name"]) for each in result["soundness"]]
    assert found == expected


def test_a_candidate_with_a_fault_is_not_ready(tmp_path: Path) -> None:
    """Every hunk merges, so nothing else says so."""
    ours, theirs, _ = CASES["a variable was renamed"]
    result = reviewed(tmp_path, ours, theirs)
    assert result["verdict"] == review.EYES
    (fault,) = result["soundness"]
    assert fault["path"] == PATH
    lines = (tmp_path / "out" / "0.23.0" / "candidate" / "vendor_overlay" / PATH).read_text()
    assert "min(logits)" in lines.splitlines()[fault["line"] - 1]
    assert any("not ready" in w and f"line {fault['line']}" in w for w in result["warnings"])
    assert result["candidate"]["ready"] is False
    assert result["candidate"]["pin"] is False
    folder = tmp_path / "out" / "0.23.0"
    assert not (folder / "candidate" / "VERSION_PIN").exists()
    report = (folder / review.MARKDOWN).read_text()
    assert "## The candidate is not ready: 1 fault" in report
    assert "Undefined name" in (folder / review.PAGE).read_text()
    assert json.loads((folder / review.JSON).read_text())["soundness"] == result["soundness"]


def test_a_sound_candidate_is_ready(tmp_path: Path) -> None:
    result = reviewed(tmp_path, HEAD, [])
    assert result["soundness"] == []
    assert result["candidate"]["ready"] is True
    assert "not ready" not in (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()


def test_files_that_conflict_are_not_looked_at(tmp_path: Path) -> None:
    result = reviewed(tmp_path, WAIT, [("        self.wait()\n", "        self.wait(1)\n")])
    assert result["verdict"] == review.CONFLICT
    assert result["soundness"] == []
    assert result["candidate"]["ready"] is False


def test_without_ruff_nothing_is_said_to_be_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OverlayError, match="ruff cannot be run"):
        reviewed(tmp_path, HEAD, [])
