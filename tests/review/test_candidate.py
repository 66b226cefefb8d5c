"""Candidates that merge, and would not run."""

import sys
from pathlib import Path

import pytest
from overlay.errors import OverlayError
from review import review
from review.review import Review
from support import reviews
from support.series import RUNNER, replaced

WAIT = ("        self.wait()\n", "        readiness.note(self, chosen)\n")
HEAD = ("LIMIT = 8\n", "LIMIT = 8\n\n\ndef note():\n    return 1\n")

#: The patch's edit, the release's edits, and what is wrong with the merge of both.
CASES: dict[str, tuple[tuple[str, str], list[tuple[str, str]], list[str]]] = {
    "a variable was renamed": (
        ("        return chosen\n", "        return chosen + min(logits)\n"),
        [("    def sample(self, logits):\n        self.prepare(logits)\n"
          "        chosen = max(logits)\n",
          "    def sample(self, scores):\n        self.prepare(scores)\n"
          "        chosen = max(scores)\n")],
        ["logits"],
    ),
    "a module's constant was renamed": (
        ("        total = sum(self.rows)\n", "        total = sum(self.rows[:LIMIT])\n"),
        [("LIMIT = 8\n", "BOUND = 8\n")],
        ["LIMIT"],
    ),
    "a function became a class": (
        ("        self.rows.remove(row)\n",
         "        self.rows.remove(row)\n        return True\n"),
        [("    def drop(self, row):\n", "    rows, row = [1], 1\n\n    class drop:\n")],
        ["does not compile"],
    ),
    "an import that both have": (
        ('"""Runs."""\n', '"""Runs."""\n\nimport logging\n'),
        [("LIMIT = 8\n", "LIMIT = 8\nimport logging\n")],
        ["logging"],
    ),
    "a function that both have": (
        HEAD,
        [("    def finish(self):\n        total = sum(self.rows)\n        return total\n",
          "    def finish(self):\n        total = sum(self.rows)\n        return total\n\n\n"
          "def note():\n    return 2\n")],
        ["note"],
    ),
    "a method that both have": (
        ("    def prepare(self, rows):\n", "    def note(self):\n        return 1\n\n"
         "    def prepare(self, rows):\n"),
        [("        return total\n", "        return total\n\n    def note(self):\n"
          "        return 2\n")],
        ["note"],
    ),
    "an attribute that both set": (
        ("        self.rows = []\n", "        self.rows = []\n        self.notes = []\n"),
        [("        return total\n", "        self.notes = {}\n        return total\n")],
        ["notes"],
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


def reviewed(root: Path, ours: tuple[str, str], theirs: list[tuple[str, str]]) -> Review:
    release = reviews.release(text=replaced(RUNNER, *theirs))
    return reviews.reviewed(root, release, edits=(ours,))


@pytest.mark.parametrize("name", CASES)
def test_what_merges_and_would_not_run_is_found(name: str, tmp_path: Path) -> None:
    ours, theirs, expected = CASES[name]
    result = reviewed(tmp_path, ours, theirs)
    assert result.conflicts == []
    faults = result.candidate.faults
    assert bool(faults) == bool(expected)
    for what in expected:
        assert any(what in fault for fault in faults)
    assert result.candidate.ready is not bool(faults)
    pin = tmp_path / "out" / "0.23.0" / "candidate" / "VERSION_PIN"
    assert pin.exists() is not bool(faults)
    if faults:
        assert result.verdict == review.CHANGED
        assert any("the candidate is not ready" in each for each in result.decisions)


def test_a_variable_that_both_set_is_in_a_function_that_has_changed(tmp_path: Path) -> None:
    """The faults do not have it: the function, in which a patch stands, is to be read."""
    ours = ("        self.prepare(logits)\n", "        note = self.prepare(logits)\n")
    theirs = [("        return chosen\n", "        note = chosen\n        return note\n")]
    result = reviewed(tmp_path, ours, theirs)
    assert "vllm.v1.runner.Runner.sample" in [each.name for each in result.changes]


def test_files_that_conflict_are_not_looked_at(tmp_path: Path) -> None:
    result = reviewed(tmp_path, WAIT, [("        self.wait()\n", "        self.wait(1)\n")])
    assert result.verdict == review.CONFLICT
    assert (result.candidate.faults, result.candidate.ready) == ((), False)


def test_without_ruff_nothing_is_said_to_be_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OverlayError, match="ruff cannot be run"):
        reviewed(tmp_path, HEAD, [])
