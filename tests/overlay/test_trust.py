"""An installation's own provenance is not trusted: anyone may have prepared it."""

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import cli
from overlay import pin as pins
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from support import mini
from support.sites import REPO, snapshot

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
        assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
        assert snapshot(site) == before
    monkeypatch.setattr(pins, "EARLIER", {LOGGER: sha256(THEIRS)})
    assert cli.main(["revert", "--site", str(site)]) == Exit.DONE
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
        assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
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
COMMANDS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from overlay import cli
cli.ROOT = Path(sys.argv[2])
for command in sys.argv[4:]:
    code = cli.main([command, "--site", sys.argv[3]])
    if code != 5:
        sys.exit(f"{command} says {code}")
"""


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
    foreign(site, ours, "verify", "status", "apply", "revert")
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
    foreign(site, ours, "verify", "status")


def foreign(site: Path, overlay: Overlay, *commands: str) -> None:
    """Each command says so; the limit only turns a wait without end into a failure."""
    command = [sys.executable, "-c", COMMANDS, *map(str, (REPO / "scripts", overlay.root, site))]
    done = subprocess.run([*command, *commands], timeout=60, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")])
@pytest.mark.parametrize("command", ["status", "apply", "revert"])
@pytest.mark.parametrize("older", [True, False])
def test_a_record_that_is_no_file_is_not_to_be_moved_away(
    tmp_path: Path,
    ours: Overlay,
    older: bool,
    command: str,
    put: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without it vLLM cannot be uninstalled; our own file comes back by itself."""
    site = mini.overlaid(tmp_path)
    if not older:
        assert cli.main(["apply", "--site", str(site)]) == Exit.DONE
    for path, next_step in (
        (f"{mini.INFO}/RECORD", "restore the installer's RECORD, or reinstall"),
        (f"{PACKAGE}/a.py", "move it away"),
    ):
        kept = (site / path).read_bytes()
        (site / path).unlink()
        put(site / path)
        assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
        message = "".join(capsys.readouterr())
        assert next_step in message
        assert "is not a file of the overlay" not in message
        (site / path).rmdir() if (site / path).is_dir() else (site / path).unlink()
        (site / path).write_bytes(kept)
