"""An installation's own provenance is not trusted: anyone may have prepared it."""

import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import pin as pins
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from support import mini
from support.sites import run, snapshot

LOGGER = "vllm/logger.py"
THEIRS = b"import logging\n"
EVIL = b"import evil\n"


def test_a_file_that_only_an_earlier_version_changed_is_given_back(
    tmp_path: Path, ours: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record names no other file, though its patches and RECORD agree with it."""
    pristine = {**mini.PRISTINE, LOGGER: THEIRS}
    site = mini.overlaid(
        tmp_path, pristine, {**mini.OVERLAID, LOGGER: b"import logging  # changed\n"}
    )
    before = snapshot(site)
    for command, known in itertools.product(("apply", "revert"), ({}, {LOGGER: sha256(EVIL)})):
        monkeypatch.setattr(pins, "EARLIER", known)
        run(command, "--site", site, code=Exit.FOREIGN)
        assert snapshot(site) == before
    monkeypatch.setattr(pins, "EARLIER", {LOGGER: sha256(THEIRS)})
    run("revert", "--site", site, code=Exit.DONE)
    assert snapshot(site) == snapshot(mini.install(tmp_path / "fresh", pristine))


@pytest.mark.parametrize(
    "name", ["../../victim", "/etc/victim", "other/victim.py", "vllm/../victim", "vllm/link/x.py"]
)
@pytest.mark.parametrize("section", ["upstream", "result"])
def test_a_record_does_not_reach_out_of_the_package(
    tmp_path: Path, ours: Overlay, name: str, section: str
) -> None:
    site = mini.overlaid(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.py").write_bytes(THEIRS)
    (site / "vllm" / "link").symlink_to(outside)
    record = site / PACKAGE / "provenance" / "VERSION_PIN"
    text = record.read_text()
    rows = [section] if section == "result" else ["upstream", "result"]
    for row in rows:
        digest = sha256(THEIRS if row == "result" else EVIL)
        text = text.replace(f"[{row}]\n", f"[{row}]\n{digest}  {name}\n")
    record.write_text(text)
    before = snapshot(tmp_path)
    for command in ("revert", "apply"):
        run(command, "--site", site, code=Exit.FOREIGN)
    assert snapshot(tmp_path) == before


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        # An address holds 108 bytes, which the whole path may be longer than.
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES = [
    f"{PACKAGE}/provenance/VERSION_PIN",
    f"{PACKAGE}/provenance/patches/series",
    f"{PACKAGE}/provenance/patches/0001-all.patch",
    f"{PACKAGE}/a.py",
    "vllm/one.py",
    f"{mini.INFO}/RECORD",
    "vllm/__pycache__/one.cpython-399.pyc",
]
ODD = [a_socket, a_device, Path.mkdir, a_huge_file]


@pytest.mark.parametrize(
    ("place", "put"),
    [*((place, os.mkfifo) for place in PLACES), *itertools.product([PLACES[0], PLACES[-3]], ODD)],
)
def test_nothing_is_waited_for_that_is_no_plain_file(
    tmp_path: Path, ours: Overlay, place: str, put: Callable[[Path], None]
) -> None:
    site = mini.overlaid(tmp_path)  # by another version: all is read
    (site / "vllm" / "__pycache__").mkdir(exist_ok=True)
    (site / place).unlink(missing_ok=True)
    put(site / place)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in site.rglob("*"))
    foreign(site, "verify", "status", "apply", "revert")
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in site.rglob("*")) == before


@pytest.mark.parametrize("put", [os.mkfifo, a_huge_file])
@pytest.mark.parametrize("name", ["METADATA", "RECORD", "direct_url.json"])
def test_nothing_is_waited_for_that_is_only_shown(
    tmp_path: Path, ours: Overlay, name: str, put: Callable[[Path], None]
) -> None:
    site = mini.overlaid(tmp_path)
    place = site / mini.INFO / name
    place.unlink(missing_ok=True)
    put(place)
    foreign(site, "verify", "status")


def foreign(site: Path, *commands: str) -> None:
    """Each command says so; the limit only turns a wait without end into a failure."""
    for command in commands:
        run(command, "--site", site, code=Exit.FOREIGN, timeout=60)


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("command", ["status", "apply", "revert"])
@pytest.mark.parametrize("older", [True, False])
def test_a_record_that_is_no_file_is_not_to_be_moved_away(
    tmp_path: Path,
    ours: Overlay,
    older: bool,
    command: str,
    put: Callable[[Path], None],
) -> None:
    """Without it vLLM cannot be uninstalled; our own file comes back by itself."""
    site = mini.overlaid(tmp_path)
    if not older:
        run("apply", "--site", site, code=Exit.DONE)
    for path, next_step in (
        (f"{mini.INFO}/RECORD", "restore the installer's RECORD, or reinstall"),
        (f"{PACKAGE}/a.py", "move it away"),
    ):
        kept = (site / path).read_bytes()
        (site / path).unlink()
        put(site / path)
        done = run(command, "--site", site, code=Exit.FOREIGN)
        message = done.stdout + done.stderr
        assert next_step in message
        assert "is not a file of the overlay" not in message
        (site / path).rmdir() if (site / path).is_dir() else (site / path).unlink()
        (site / path).write_bytes(kept)
