"""An installation of a newer overlay, which changes a file that this version does not know."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from overlay import cli
from overlay import pin as pins
from overlay.errors import Exit
from overlay.installation import locate
from overlay.patches import Series
from overlay.pin import PACKAGE, Pin
from overlay.source import Overlay
from overlay.state import State, inspect
from series.checksums import expected_pin
from support import faults, mini, sites
from support.sites import OVERLAY, UPSTREAM, run, snapshot

PROVENANCE = f"{PACKAGE}/provenance"
PIN = f"{PROVENANCE}/{pins.NAME}"
LOGGER = "vllm/logger.py"
MARK = b"# Changed by vllm-readiness-overlay. The patches in vllm/v1/readiness/provenance/patches\n"
COMMANDS: Sequence[Sequence[str]] = (
    ["status"],
    ["status", "--json"],
    ["status", "--verbose"],
    ["verify"],
    ["verify", "--json"],
    ["doctor"],
    ["apply"],
    ["apply", "--dry-run"],
    ["apply", "--leave=vllm/v1/engine/output_processor.py"],
    ["revert"],
    ["revert", "--dry-run"],
    ["exec", "--", "true"],
    ["diff"],
)


def newer_than(overlay: Overlay, folder: Path, release: str = OVERLAY.pin.release) -> Overlay:
    """A version 0.99.0 in ``folder``: one more patch of one more file, and one more module.

    Everything else is as in ``overlay``, so that most files have the same bytes.
    """
    for name in ("patches", "vendor_overlay"):
        shutil.copytree(overlay.root / name, folder / name)
    before = (UPSTREAM / LOGGER).read_bytes()
    patch = mini.HEADER.encode() + b"\n" + mini.unified(LOGGER, before, MARK + before)
    (folder / "patches" / "0099-newer.patch").write_bytes(patch)
    with (folder / "patches" / "series").open("a") as series:
        series.write("0099-newer.patch\n")
    ours = folder / "vendor_overlay" / PACKAGE
    (ours / "newer.py").write_text("X = 1\n")
    (ours / "version.py").write_text('__version__ = "0.99.0"\n')
    empty = Pin(release, "0.99.0", {}, {}, {})
    series_of = Series.load(folder / "patches")
    pin = expected_pin(folder, empty, series_of, lambda path: (UPSTREAM / path).read_bytes())
    (folder / pins.NAME).write_text(pin.dumps())
    return Overlay.load(folder)


@pytest.fixture
def stock(site: Path) -> Path:
    """The real installation, cut down, with the file that the newer version changes, too."""
    shutil.copy(UPSTREAM / LOGGER, site / LOGGER)
    sites.shorten_record(site)
    return site


@pytest.fixture
def newer(tmp_path: Path) -> Overlay:
    return newer_than(OVERLAY, tmp_path / "newer")


def said(site: Path, command: Sequence[str], code: Exit = Exit.FOREIGN) -> str:
    """The output of a command that must end with ``code`` and change nothing."""
    before = snapshot(site)
    name, *options = command
    done = run(name, "--site", site, *options)
    assert done.returncode == (code if name != "status" or code else Exit.DONE), command
    assert snapshot(site) == before, f"{command} has changed a file"
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_names_it_and_says_how_it_comes_off(
    stock: Path, newer: Overlay, command: Sequence[str]
) -> None:
    mini.lay(newer, stock)
    text = said(stock, command)
    assert "overlay 0.99.0" in text
    for part in ("revert with overlay 0.99.0", "reinstall vllm"):
        assert part in text
    assert "move" not in text.replace("removed", "")
    assert "is not the overlay's" not in text


def an_earlier_revert(site: Path) -> None:
    """As this tool has done it: RECORD no longer lists our files, and only lines are left."""
    shutil.rmtree(site / PACKAGE)
    record = site / sites.INFO / "RECORD"
    rows = record.read_bytes().splitlines(keepends=True)
    record.write_bytes(b"".join(row for row in rows if not row.startswith(PACKAGE.encode())))
    for path in OVERLAY.targets:
        shutil.copy(UPSTREAM / path, site / path)


def removed(*paths: str) -> Callable[[Path], None]:
    def remove(site: Path) -> None:
        for path in paths:
            (shutil.rmtree if (site / path).is_dir() else os.unlink)(site / path)

    return remove


MOVED = {
    "the pin": removed(PIN),
    "the provenance": removed(PROVENANCE),
    "all of ours": removed(PACKAGE),
    "all and RECORD": removed(PACKAGE, f"{sites.INFO}/RECORD"),
    "an earlier revert": an_earlier_revert,
}


@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_its_lines_are_not_taken_for_upstream_s_after_its_record_is_gone(
    stock: Path, newer: Overlay, move: Callable[[Path], None]
) -> None:
    """Somebody has moved files away, as earlier versions of this tool told them to."""
    mini.lay(newer, stock)
    move(stock)
    for command in COMMANDS:
        text = said(stock, command)
        assert "reinstall vllm" in text, command
        assert "pristine\n" not in text.splitlines()[0] + "\n"
    assert sites.status(stock)["state"] == State.FOREIGN.value


def test_rows_of_another_version_in_record_are_not_taken_for_the_installer_s(
    stock: Path, newer: Overlay
) -> None:
    """Upstream's files are back, by hand, and RECORD is not."""
    mini.lay(newer, stock)
    shutil.rmtree(stock / PACKAGE)
    for path in newer.targets:
        shutil.copy(UPSTREAM / path, stock / path)
    for command in COMMANDS:
        text = said(stock, command)
        assert "RECORD" in text, command
        assert "reinstall vllm" in text


def test_a_record_of_this_version_can_still_be_restored(stock: Path) -> None:
    """Somebody has deleted our directory: nothing is lost by that."""
    before = snapshot(stock)
    for options in ([], ["--leave=vllm/v1/engine/output_processor.py"]):
        assert run("apply", "--site", stock, *options).returncode == Exit.DONE
        shutil.rmtree(stock / PACKAGE)
        if not options:
            assert run("status", "--site", stock).returncode == Exit.PARTIAL
            assert run("revert", "--site", stock).returncode == Exit.DONE
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


@pytest.mark.parametrize("installed", [OVERLAY.pin.release, "99.1"])
def test_the_release_that_it_is_for_is_named(stock: Path, tmp_path: Path, installed: str) -> None:
    mini.lay(newer_than(OVERLAY, tmp_path / "newer", "99.1"), stock)
    sites.state_version(stock, installed)
    code = Exit.RELEASE if installed == "99.1" else Exit.FOREIGN
    for command in COMMANDS:
        text = said(stock, command, code)
        assert "overlay 0.99.0, which is for vLLM 99.1" in text, command
        assert "revert with overlay 0.99.0" in text
        assert "move" not in text.replace("removed", "")


def test_what_a_killed_apply_of_it_staged_is_found(tmp_path: Path, ours: Overlay) -> None:
    """In a directory in which this version changes nothing."""
    other = "vllm/config/other.py"
    pristine = {**mini.PRISTINE, other: b"A = 1\n"}
    newer = mini.overlay(
        tmp_path / "newer", pristine, {**mini.OVERLAID, other: MARK + b"A = 2\n"}, version="0.0.3"
    )
    fresh = mini.install(tmp_path / "fresh", pristine)
    seen = set()
    for at in range(1, 200):
        site = Path(shutil.copytree(fresh, tmp_path / "site"))
        status = faults.cut(["apply", "--site", str(site), "--force"], newer.root, at)
        state = inspect(locate(site=str(site)), ours).state
        seen.add(state)
        if state is State.PRISTINE:
            assert snapshot(site) == snapshot(fresh), f"cut {at}"
        elif state is State.PARTIAL:
            assert cli.main(["revert", "--site", str(site)]) == Exit.DONE
            assert snapshot(site) == snapshot(fresh), f"cut {at}, then revert"
        shutil.rmtree(site)
        if status is None:
            break
    assert seen == {State.PRISTINE, State.PARTIAL, State.FOREIGN}
