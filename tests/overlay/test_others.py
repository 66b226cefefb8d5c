"""Others have fixed or mounted the files, or change them during a run."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from overlay import commands
from overlay.commands import Options
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.pin import PACKAGE
from overlay.source import Overlay
from overlay.staging import Staging
from support import mini, mounts
from support.sites import run, snapshot

ONE, TWO = mini.PRISTINE
RECORD = f"{mini.INFO}/RECORD"
PYC = "vllm/__pycache__/one.cpython-399.pyc"
NOW = Options(force=True, wait=5)


@pytest.fixture
def site(tmp_path: Path, ours: Overlay) -> Path:
    """A small installation, whose path holds what mountinfo escapes."""
    site = mini.install(tmp_path / "a site with\\signs")
    (site / PYC).parent.mkdir()
    (site / PYC).write_bytes(b"")
    return site


OURS = [f"{PACKAGE}/a.py", f"{PACKAGE}/provenance/VERSION_PIN"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("path", ["", "vllm", "vllm/v1", mini.INFO])
def test_a_read_only_directory_is_found_first(site: Path, command: str, path: str) -> None:
    target = ("--site", site, "--python", sys.executable)
    if command == "revert":
        run("apply", *target, code=Exit.DONE)
    with mounts.bound(site / path, read_only=True):
        before = snapshot(site, bytecode=True)
        for extra in ([], ["--dry-run"]):
            message = run(command, "--site", site, "--force", *extra, code=Exit.DENIED).stderr
            assert f"{site / path}" in message
            assert "Read-only file system; nothing was written" in message
        assert snapshot(site, bytecode=True) == before
    run(command, *target, code=Exit.DONE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_directory_on_the_way_may_be_a_mount(site: Path) -> None:
    with mounts.bound(site / "vllm"):
        before = snapshot(site)
        for command in ("apply", "revert"):
            run(command, "--site", site, "--python", sys.executable, code=Exit.DONE)
        assert snapshot(site) == before


def test_an_error_names_the_file_and_not_the_staged_one(
    site: Path, ours: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.replace

    def busy(source: Any, target: Any) -> None:
        if Path(target) == site / TWO:
            raise OSError(16, "Device or resource busy", str(source), None, str(target))
        original(source, target)

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(OverlayError, match="Device or resource busy") as caught:
        commands.apply(locate(site=str(site)), ours, NOW)
    assert caught.value.subject == str(site / TWO)
    assert "the installation is partial" in caught.value.reason


def meanwhile(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Make a change when everything is staged, and nothing renamed."""
    original, changes = Staging.commit, [change]

    def commit(staging: Staging, finals: Iterable[Path]) -> None:
        while changes:
            changes.pop()()
        original(staging, finals)

    monkeypatch.setattr(Staging, "commit", commit)


def a_line_more(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"# mine\n")


def another_file(path: Path) -> None:
    path.with_name("new").write_bytes(b"# mine\n")
    path.with_name("new").replace(path)


def appears(path: Path) -> None:
    path.write_bytes(b"# mine\n")


@pytest.mark.parametrize(
    ("path", "command", "change"),
    [
        *itertools.product(
            [ONE, RECORD],
            ["apply", "revert"],
            [a_line_more, another_file, Path.unlink],
        ),
        (OURS[0], "revert", a_line_more),
        (OURS[0], "revert", another_file),
        (OURS[0], "apply", appears),
        (f"{PACKAGE}/sub/notes.txt", "revert", appears),
    ],
)
def test_a_change_meanwhile_is_left_alone(
    site: Path,
    path: str,
    command: str,
    change: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = ("--site", site, "--python", sys.executable)
    if command == "revert" or path in OURS:
        run("apply", *target, code=Exit.DONE)
    if change is appears:
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).unlink(missing_ok=True)
    changed = []

    def edit() -> None:
        change(site / path)
        changed.append(snapshot(site).get(path))

    meanwhile(monkeypatch, edit)
    message = run(command, *target, code=Exit.FOREIGN).stderr
    assert str(site / path) in message
    assert "sub" in path or "was changed by another program" in message
    assert changed[0] == snapshot(site).get(path)
