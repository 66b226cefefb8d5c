"""An installation of a newer overlay, which changes a file that this version does not know."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.files import remove
from overlay.pin import PACKAGE
from overlay.source import PIN, PROVENANCE, Overlay
from overlay.state import State
from support import mini, sites
from support.sites import run, snapshot

LOGGER, LOGS = "vllm/logger.py", b"import logging\n"
MARK = b"# Changed by vllm-readiness-overlay. The patches in vllm/v1/readiness/provenance/patches\n"
PRISTINE = {**mini.PRISTINE, LOGGER: LOGS}
LEAVE = "--leave=vllm/v1/two.py"
COMMANDS = (
    *("status", "status --json", "status --verbose", "verify", "verify --json", "doctor"),
    *("apply", "apply --dry-run", f"apply {LEAVE}", "revert", "revert --dry-run"),
    *("exec -- true", "diff"),
)


def newer_than(ours: Overlay, folder: Path, release: str = mini.RELEASE) -> Overlay:
    """A version 0.99.0 in ``folder``: one more changed file, and one more module.

    Everything else is as in ``ours``, so that most files have the same bytes.
    """
    files = {path: ours.added_bytes(path) for path in ours.added if path.endswith(".py")}
    changed = {**mini.OVERLAID, LOGGER: MARK + LOGS}
    files |= {f"{PACKAGE}/newer.py": b"", f"{PACKAGE}/version.py": b'__version__ = "0.99.0"\n'}
    return mini.overlay(folder, PRISTINE, changed, files, "0.99.0", release=release)


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    """An installation with the file that the newer version changes, too."""
    return mini.install(tmp_path / "site", PRISTINE)


@pytest.fixture
def newer(tmp_path: Path, worded: Overlay) -> Overlay:
    return newer_than(worded, tmp_path / "newer")


def said(site: Path, command: str, code: Exit = Exit.FOREIGN) -> str:
    """The output of a command that must end with ``code`` and change nothing."""
    before = snapshot(site)
    name, *options = command.split()
    done = run(name, "--site", site, *options, code=code)
    assert snapshot(site) == before, f"{command} has changed a file"
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_it_and_says_how_it_comes_off(
    stock: Path, newer: Overlay, command: str
) -> None:
    mini.lay(newer, stock)
    text = said(stock, command)
    assert "overlay 0.99.0" in text
    for part in ("revert with overlay 0.99.0", "reinstall vllm"):
        assert part in text
    assert "move" not in text.replace("removed", "")
    assert "is not the overlay's" not in text


@pytest.mark.parametrize("moved", [PIN, PROVENANCE])
def test_its_lines_are_not_taken_for_upstream_s_after_its_record_is_gone(
    stock: Path, newer: Overlay, moved: str
) -> None:
    """Somebody has moved files away, as earlier versions of this tool told them to."""
    mini.lay(newer, stock)
    remove(stock / moved)
    for command in COMMANDS:
        text = said(stock, command)
        assert "reinstall vllm" in text, command
        assert "pristine\n" not in text.splitlines()[0] + "\n"
    assert sites.status(stock)["state"] == State.FOREIGN.value


def test_a_record_of_this_version_can_still_be_restored(stock: Path, worded: Overlay) -> None:
    """Somebody has deleted our directory: nothing is lost by that."""
    before = snapshot(stock)
    run("apply", "--site", stock, code=Exit.DONE)
    shutil.rmtree(stock / PACKAGE)
    run("status", "--site", stock, code=Exit.PARTIAL)
    run("revert", "--site", stock, code=Exit.DONE)
    assert snapshot(stock) == before


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no text": lambda pin: b"\xff\x00" * 9,
    "half": lambda pin: pin[: len(pin) // 2],
    "a later format": lambda pin: pin + b"\n[modules]\nsomething = else\n",
    "nothing": lambda pin: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_pin_that_cannot_be_read_is_not_to_be_moved_away(
    stock: Path, newer: Overlay, damage: str
) -> None:
    mini.lay(newer, stock)
    (stock / PIN).write_bytes(DAMAGES[damage]((stock / PIN).read_bytes()))
    for command in COMMANDS:
        text = said(stock, command)
        assert "reinstall vllm" in text, command
        assert "move" not in text.replace("removed", "")
        assert ("0.99.0" in text) is (damage in ("half", "a later format"))


@pytest.mark.parametrize("installed", [mini.RELEASE, "99.1"])
def test_the_release_that_it_is_for_is_named(
    stock: Path, worded: Overlay, tmp_path: Path, installed: str
) -> None:
    mini.lay(newer_than(worded, tmp_path / "newer", "99.1"), stock)
    mini.state_version(stock, installed)
    code = Exit.RELEASE if installed == "99.1" else Exit.FOREIGN
    for command in COMMANDS:
        text = said(stock, command, code)
        assert "overlay 0.99.0, which is for vLLM 99.1" in text, command
        assert "revert with overlay 0.99.0" in text
        assert "move" not in text.replace("removed", "")
