"""Releases that lack a patched file, and releases with our own place."""

from pathlib import Path

import pytest
from overlay.pin import PACKAGE
from overlay.source import Overlay
from review import __main__ as program
from review import review
from series.refresh import refresh
from support import checkouts, series
from support.reviews import prepare, release, reviewed
from support.series import BASE, EDITS, OTHER, PATH, RUNNER, replaced

PACKAGED = "vllm/v1/runner/__init__.py"
ELSEWHERE = "vllm/v1/worker/running.py"
SHIM = '"""The old place."""\n\nfrom vllm.v1.worker.running import *  # noqa: F403\n'
NEW = series.replaced(RUNNER, ("LIMIT = 8", "LIMIT = 9"))
TEXT = '"""Second."""\n\n\ndef second():\n    return 2\n'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({PACKAGED: NEW}, f"it is gone; most of its lines are in {PACKAGED} now"),
        (
            {ELSEWHERE: NEW, "vllm/v1/worker/other.py": TEXT, PACKAGED: SHIM},
            f"it is gone; most of its lines are in {ELSEWHERE} now",
        ),
        ({"vllm/v1/fresh.py": TEXT}, "it is gone, and no new file is like it"),
        ({ELSEWHERE: NEW, PATH: SHIM}, ""),
    ],
)
def test_a_file_that_is_gone_or_empty_is_noticed(
    files: dict[str, str], said: str, tmp_path: Path
) -> None:
    result = reviewed(tmp_path, release({OTHER: BASE[OTHER], **files}))
    assert result.lacking == ([f"{PATH}: {said}"] if said else [])
    assert {j.verdict for j in result.merged.patches} <= {"conflicts", "obsolete"}
    assert result.verdict != review.UNCHANGED
    assert f"{PATH}: {said}" in result.decisions or not said
    folder = tmp_path / "out" / "0.23.0"
    assert said in (folder / review.MARKDOWN).read_text().replace("\\", "")
    assert not (folder / "candidate" / "vendor_overlay" / PATH).exists()


@pytest.mark.parametrize("path", [f"{PACKAGE}/__init__.py", f"{PACKAGE}.py"])
def test_a_release_with_our_package_is_a_conflict(path: str, tmp_path: Path) -> None:
    """Every patch applies, and its modules would be overwritten."""
    result = reviewed(tmp_path, release({**BASE, path: "READY = 1\n"}))
    assert {judged.verdict for judged in result.merged.patches} == {"applies"}
    assert result.verdict == review.CONFLICT
    assert result.candidate.ready is False
    assert any(PACKAGE in each for each in result.decisions)


def test_a_package_of_another_name_is_none(tmp_path: Path) -> None:
    files = {**BASE, f"{PACKAGE}_check.py": "READY = 1\n"}
    assert not reviewed(tmp_path, release(files)).taken


@pytest.mark.parametrize("now", [PACKAGED, ELSEWHERE])
def test_a_rebase_follows_a_file(now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = series.checkout(tmp_path / "checkout").root
    files = {OTHER: BASE[OTHER], now: NEW}
    prepare(monkeypatch, root, series.upstream(BASE), lambda _: release(files))
    assert program.main(["rebase", "0.23.0"]) == 0
    assert checkouts.git(root / "build" / "edit", "status", "--porcelain").stdout == ""
    assert not (root / "build" / "edit" / PATH).exists()
    refresh(root, dry_run=False)
    overlay = Overlay.load(root)
    assert overlay.targets == [now]
    assert overlay.series.apply(now, NEW.encode()).decode() == replaced(NEW, *EDITS)
