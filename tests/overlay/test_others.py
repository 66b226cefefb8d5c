"""Others have fixed or mounted the files, or change them during a run."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from overlay import cli, commands
from overlay.commands import Options
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.pin import PACKAGE
from overlay.source import Overlay
from overlay.staging import Staging
from support import mini, mounts
from support.sites import snapshot

ONE, TWO = mini.PRISTINE
RECORD = f"{mini.INFO}/RECORD"
PYC = "vllm/__pycache__/one.cpython-399.pyc"
NOW = Options(force=True, wait=5)


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    overlay = mini.overlay(tmp_path / "overlay")
    monkeypatch.setattr(cli, "ROOT", overlay.root)
    return overlay


@pytest.fixture
def site(tmp_path: Path, overlay: Overlay) -> Path:
    """A small installation, whose path holds what mountinfo escapes."""
    site = mini.install(tmp_path / "a site with\\signs")
    (site / PYC).parent.mkdir()
    (site / PYC).write_bytes(b"")
    return site


def run(command: str, site: Path) -> int:
    return cli.main([command, "--site", str(site), "--force", "--python", sys.executable])


@pytest.fixture
def marked() -> Iterator[Callable[[str, Path], None]]:
    """Sets a flag, and clears it in the end."""
    done: list[tuple[str, Path]] = []

    def mark(flag: str, path: Path) -> None:
        message = subprocess.run(["chattr", f"+{flag}", path], capture_output=True, check=False)
        if message.returncode:
            pytest.skip(f"chattr: {message.stderr.decode().strip()}")
        done.append((flag, path))

    yield mark
    for flag, path in done:
        subprocess.run(["chattr", f"-{flag}", path], check=True)


FILES = [ONE, TWO, RECORD, PYC]
OURS = [f"{PACKAGE}/a.py", f"{PACKAGE}/provenance/VERSION_PIN"]
FOLDERS = ["vllm", "vllm/v1", "vllm/__pycache__", mini.INFO]


def refused(command: str, site: Path, path: str, text: str, capsys: Any) -> None:
    """The run is refused before anything is written, and names the file or directory."""
    before = snapshot(site, bytecode=True)
    capsys.readouterr()
    for extra in ([], ["--dry-run"]):
        assert cli.main([command, "--site", str(site), "--force", *extra]) == Exit.DENIED
        message = capsys.readouterr().err
        assert f"{site / path}: {text}" in message
        assert "nothing was written" in message
    assert snapshot(site, bytecode=True) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set these flags")
@pytest.mark.parametrize("path", [*FILES, *OURS, *FOLDERS, PACKAGE])
@pytest.mark.parametrize(("flag", "word"), [("i", "immutable"), ("a", "append-only")])
def test_what_nobody_may_change_is_found_first(
    site: Path, path: str, flag: str, word: str, marked: Callable[[str, Path], None], capsys: Any
) -> None:
    command = "apply"
    if path.startswith(PACKAGE):
        assert run("apply", site) == Exit.DONE
        command = "revert"
    marked(flag, site / path)
    refused(command, site, path, f"is {word}", capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may set these flags")
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_cache_without_a_file_of_ours_is_looked_at_too(
    site: Path, command: str, marked: Callable[[str, Path], None], capsys: Any
) -> None:
    if command == "revert":
        assert cli.main(["apply", "--site", str(site)]) == Exit.DONE
    cache = site / "vllm" / "v1" / "__pycache__"
    cache.mkdir()
    marked("i", cache)
    refused(command, site, "vllm/v1/__pycache__", "is immutable", capsys)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize("path", ["", "vllm", "vllm/v1", mini.INFO])
def test_a_mount_to_read_is_found_first(site: Path, path: str, command: str, capsys: Any) -> None:
    if command == "revert":
        assert run("apply", site) == Exit.DONE
    with mounts.bound(site / path, read_only=True):
        for extra in ([], ["--dry-run"]):
            assert cli.main([command, "--site", str(site), "--force", *extra]) == Exit.DENIED
            message = capsys.readouterr().err
            assert f"{site / path}" in message
            assert "Read-only file system; nothing was written" in message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
@pytest.mark.parametrize("path", [*FILES, *OURS, PACKAGE])
def test_a_mount_is_found_first(site: Path, path: str, capsys: Any) -> None:
    command = "apply"
    if path.startswith(PACKAGE):
        assert run("apply", site) == Exit.DONE
        command = "revert"
    with mounts.bound(site / path):
        refused(command, site, path, "is a mount point", capsys)
    assert run(command, site) == Exit.DONE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_directory_on_the_way_may_be_a_mount(site: Path) -> None:
    with mounts.bound(site / "vllm"):
        before = snapshot(site)
        assert run("apply", site) == Exit.DONE
        assert run("revert", site) == Exit.DONE
        assert snapshot(site) == before


def test_an_error_names_the_file_and_not_the_staged_one(
    site: Path, overlay: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.replace

    def busy(source: Any, target: Any) -> None:
        if Path(target) == site / TWO:
            raise OSError(16, "Device or resource busy", str(source), None, str(target))
        original(source, target)

    monkeypatch.setattr(os, "replace", busy)
    with pytest.raises(OverlayError, match="Device or resource busy") as caught:
        commands.apply(locate(site=str(site)), overlay, NOW)
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


def another_mode(path: Path) -> None:
    path.chmod(path.stat().st_mode ^ 0o044)


def appears(path: Path) -> None:
    path.write_bytes(b"# mine\n")


@pytest.mark.parametrize(
    ("path", "command", "change"),
    [
        *itertools.product(
            [ONE, RECORD],
            ["apply", "revert"],
            [a_line_more, another_file, another_mode, Path.unlink],
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
    capsys: Any,
) -> None:
    if command == "revert" or path in OURS:
        assert run("apply", site) == Exit.DONE
    if change is appears:
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).unlink(missing_ok=True)
    changed = []

    def edit() -> None:
        change(site / path)
        changed.append(snapshot(site).get(path))

    meanwhile(monkeypatch, edit)
    assert run(command, site) == Exit.FOREIGN
    message = capsys.readouterr().err
    assert str(site / path) in message
    assert "sub" in path or "was changed by another program" in message
    assert changed[0] == snapshot(site).get(path)
