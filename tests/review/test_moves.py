"""Releases in which a patched file has another place, or none."""

from pathlib import Path

import pytest
from overlay.pin import PACKAGE
from overlay.source import Overlay
from review import __main__ as program
from review import moves, review, wheels
from review.moves import Move
from review.review import Review
from review.wheels import Release
from series.refresh import refresh
from support import checkouts, series, worded
from support.series import BASE, EDITS, OTHER, PATH, RUNNER, replaced

PACKAGED = "vllm/v1/runner/__init__.py"
ELSEWHERE = "vllm/v1/worker/running.py"
SHIM = '"""The old place."""\n\nfrom vllm.v1.worker.running import *  # noqa: F403\n'
NEW = series.replaced(RUNNER, ("LIMIT = 8", "LIMIT = 9"))
#: A second patched file, which stays.
SECOND = "vllm/v1/second.py"
TEXT = '"""Second."""\n\n\ndef second():\n    return 2\n'


def release(files: dict[str, str]) -> Release:
    return Release("0.23.0", "w.whl", "a" * 64, "a test's", series.upstream(files))


def reviewed(root: Path, files: dict[str, str]) -> Review:
    overlay = series.checkout(root / "checkout")
    base = series.upstream(BASE)
    return review.of_release(overlay, base, release(files), root / "out", known={})


@pytest.mark.parametrize(
    ("files", "now"),
    [
        ({PACKAGED: NEW}, PACKAGED),
        ({ELSEWHERE: NEW}, ELSEWHERE),
        ({ELSEWHERE: NEW, "vllm/v1/worker/other.py": TEXT, PACKAGED: SHIM}, ELSEWHERE),
        ({ELSEWHERE: NEW, PATH: SHIM}, ELSEWHERE),
        ({PACKAGED: "".join(f"{n} = {n}\n" for n in "abc")}, PACKAGED),  # known by its name alone
    ],
)
def test_a_file_is_reviewed_where_it_went(files: dict[str, str], now: str, tmp_path: Path) -> None:
    result = reviewed(tmp_path, {OTHER: BASE[OTHER], **files})
    assert result.moved == [Move(PATH, "moved", now)]
    assert any(f"{PATH}: it is {now} now" in each for each in result.decisions)
    assert {f.path for judged in result.merged.patches for f in judged.files} == {now}
    folder = tmp_path / "out" / "0.23.0"
    assert f"it is {now} now" in (folder / review.MARKDOWN).read_text().replace("\\", "")
    if files.get(now) != NEW:
        assert {judged.verdict for judged in result.merged.patches} <= {"conflicts", "obsolete"}
        return
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    assert result.verdict == review.CHANGED
    written = (folder / "candidate" / "vendor_overlay" / now).read_text()
    assert written == replaced(NEW, *EDITS)
    patch = (folder / "candidate" / "patches" / "0001-edit-1.patch").read_text()
    assert f"+++ b/{now}\n" in patch
    pin = (folder / "candidate" / "VERSION_PIN").read_text()
    assert now in pin
    assert f"{PATH}\n" not in pin
    # Our module's names went along.
    fates = {change.name: change.fate for change in result.changes}
    assert fates.get("vllm.v1.runner.Runner.prepare") in ("moved", None)


def test_a_file_that_is_gone_does_not_lose_the_others(tmp_path: Path) -> None:
    edits = (EDITS[0], ("        return total\n", "        return total + 1\n"))
    overlay = series.checkout(tmp_path / "checkout", edits)
    base = series.upstream(BASE)
    files = {OTHER: BASE[OTHER], "vllm/v1/fresh.py": TEXT}
    result = review.of_release(overlay, base, release(files), tmp_path / "out", known={})
    assert result.moved == [Move(PATH, "gone", None)]
    assert result.verdict != review.UNCHANGED
    assert any(f"{PATH}: it is gone" in each for each in result.decisions)
    assert not (tmp_path / "out" / "0.23.0" / "candidate" / "vendor_overlay" / PATH).exists()


@pytest.mark.parametrize("path", [f"{PACKAGE}/__init__.py", f"{PACKAGE}.py"])
def test_a_release_with_our_package_is_a_conflict(path: str, tmp_path: Path) -> None:
    """Every patch applies, and its modules would be overwritten."""
    result = reviewed(tmp_path, {**BASE, path: "READY = 1\n"})
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    assert result.verdict == review.CONFLICT
    assert result.candidate.ready is False
    assert any(PACKAGE in each for each in result.decisions)


def test_a_release_whose_files_stay_has_no_such_section(tmp_path: Path) -> None:
    result = reviewed(tmp_path, {**BASE, f"{PACKAGE}_check.py": "READY = 1\n", PACKAGED: SHIM})
    assert result.moved == []


@pytest.mark.parametrize("now", [PACKAGED, ELSEWHERE])
def test_a_rebase_follows_a_file(now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = series.checkout(tmp_path / "checkout").root
    monkeypatch.setattr(program, "ROOT", root)
    monkeypatch.setattr(program, "_base", lambda *_: series.upstream(BASE))
    monkeypatch.setattr(wheels, "obtain", lambda *_: release({OTHER: BASE[OTHER], now: NEW}))
    assert program.main(["rebase", "0.23.0"]) == 0
    assert checkouts.git(root / "build" / "edit", "status", "--porcelain").stdout == ""
    assert not (root / "build" / "edit" / PATH).exists()
    refresh(root, dry_run=False)
    overlay = Overlay.load(root)
    assert overlay.targets == [now]
    assert overlay.series.apply(now, NEW.encode()).decode() == replaced(NEW, *EDITS)


def test_features_are_judged_where_a_patched_file_went(tmp_path: Path) -> None:
    overlay, base = worded.checkout(tmp_path / "checkout"), worded.upstream()
    release = worded.moved("0.23.0")
    result = review.of_release(overlay, base, release, tmp_path / "reviews", known={})
    assert [each.fate for each in result.moved] == [moves.MOVED]
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    states = {word.name: word.state for word in result.words}
    assert states.keys() == {"alpha", "beta", "gamma", "frame"}
    assert "conflicts" not in states.values()
