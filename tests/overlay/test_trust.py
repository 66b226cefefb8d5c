"""What an installation says of itself is checked: its record may have been prepared."""

import io
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from overlay import cli, commands
from overlay import pin as pins
from overlay.commands import Options
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from overlay.state import inspect
from support import mini, sites
from support.sites import OVERLAY, REPO, snapshot

NOW = Options(force=True, wait=5)
LOGGER = "vllm/logger.py"
THEIRS = b"import logging\n"
EVIL = b"import evil\n"


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlay:
    """The overlay that the command line works with."""
    made = mini.overlay(tmp_path / "ours", version="0.0.2")
    monkeypatch.setattr(cli, "ROOT", made.root)
    return made


def laid(folder: Path, pristine: dict[str, bytes], overlaid: dict[str, bytes]) -> Path:
    """An installation that some other overlay was laid over, RECORD included."""
    other = mini.overlay(folder / "other", pristine, overlaid)
    site = mini.install(folder / "site", pristine)
    commands.apply(locate(site=str(site)), other, NOW)
    return site


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_no_record_has_a_file_written_that_no_version_changes(
    tmp_path: Path, ours: Overlay, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record, its patches and RECORD agree with each other, and with nothing else."""
    site = laid(tmp_path, {**mini.PRISTINE, LOGGER: EVIL}, {**mini.OVERLAID, LOGGER: THEIRS})
    before = snapshot(site)
    assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
    assert snapshot(site) == before
    assert inspect(locate(site=str(site)), ours).replaceable is None


def test_a_file_that_only_an_earlier_version_changed_is_given_back(
    tmp_path: Path, ours: Overlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    pristine = {**mini.PRISTINE, LOGGER: THEIRS}
    site = laid(tmp_path, pristine, {**mini.OVERLAID, LOGGER: b"import logging  # changed\n"})
    assert cli.main(["revert", "--site", str(site)]) == Exit.FOREIGN
    table = tmp_path / "RELEASES"
    table.write_text(f"[upstream]\n{sha256(EVIL)}  {LOGGER}\n")
    monkeypatch.setattr(pins, "RELEASES", table)
    assert cli.main(["revert", "--site", str(site)]) == Exit.FOREIGN
    table.write_text(f"[upstream]\n{sha256(THEIRS)}  {LOGGER}\n")
    assert cli.main(["revert", "--site", str(site)]) == Exit.DONE
    assert snapshot(site) == snapshot(mini.install(tmp_path / "fresh", pristine))


@pytest.mark.parametrize(
    "name", ["../../victim", "/etc/victim", "other/victim.py", "vllm/../victim", "vllm/link/x.py"]
)
@pytest.mark.parametrize("section", ["upstream", "result"])
def test_a_record_does_not_reach_out_of_the_package(
    tmp_path: Path, ours: Overlay, name: str, section: str
) -> None:
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)
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


def history() -> dict[str, bytes]:
    """Commit to VERSION_PIN, oldest first, of every commit that changed it."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=True).stdout

    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone does not have the pins of earlier commits")
    commits = git("log", "--reverse", "--format=%H", "--", pins.NAME).decode().split()
    return {commit: git("show", f"{commit}:{pins.NAME}") for commit in commits}


def test_every_version_in_the_history_is_known() -> None:
    found = {data: pins.loads(data.decode()) for data in history().values()}
    upstream = {pair for pin in found.values() for pair in pin.upstream.items()}
    versions = {sha256(data): pin.overlay for data, pin in found.items()}
    known = pins.releases()
    # The present version's pins may still change, and are added with the next one.
    earlier = {digest: v for digest, v in versions.items() if v != OVERLAY.pin.overlay}
    lacking = [f"{digest}  {v}" for digest, v in earlier.items() if digest not in known.versions]
    assert not lacking, "add to scripts/overlay/RELEASES:\n" + "\n".join(lacking)
    assert {digest: versions.get(digest) for digest in known.versions} == known.versions
    assert known.upstream == upstream


def test_every_version_is_recognised_and_taken_off(tmp_path: Path) -> None:
    """Of each version, the last state that is listed."""
    site = sites.small(tmp_path / "site")
    sites.shorten_record(site)
    before = snapshot(site)
    installation = locate(site=str(site))
    known = pins.releases().versions
    last = {known[sha256(data)]: c for c, data in history().items() if sha256(data) in known}
    assert len(last) > 5
    for version, commit in last.items():
        command = ["git", "archive", commit, pins.NAME, "patches", "vendor_overlay"]
        packed = subprocess.run(command, cwd=REPO, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(tmp_path / "other", filter="data")
        other = Overlay.load(tmp_path / "other")
        commands.apply(installation, other, NOW)
        assert inspect(installation, OVERLAY).installed_version == version
        commands.revert(installation, OVERLAY, NOW)
        assert snapshot(site) == before
        shutil.rmtree(tmp_path / "other")


def test_another_version_is_called_by_the_name_that_its_pin_has(
    tmp_path: Path, ours: Overlay, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {**mini.OVERLAID, "vllm/one.py": b"A = 1\nB = 22\nC = 3\n"}
    site = laid(tmp_path, mini.PRISTINE, changed)
    assert inspect(locate(site=str(site)), ours).installed_version == "0.0.1 (unreleased)"
    assert cli.main(["diff", "--site", str(site)]) == Exit.FOREIGN
    said = capsys.readouterr().err
    assert "is overlaid by overlay 0.0.1 (unreleased); this is 0.0.2" in said
    assert "`apply` replaces it" in said
    (site / PACKAGE / "a.py").unlink()
    assert cli.main(["diff", "--site", str(site)]) == Exit.FOREIGN
    assert "is overlaid in part by overlay 0.0.1 (unreleased)" in capsys.readouterr().err
    assert cli.main(["status", "--site", str(site)]) == Exit.FOREIGN
    assert "0.22.0, partial by overlay 0.0.1 (unreleased)\n" in capsys.readouterr().out


PATCH = f"{PACKAGE}/provenance/patches/0001-all.patch"


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_another_version_that_cannot_be_taken_off_is_reinstalled(
    tmp_path: Path,
    ours: Overlay,
    recorded: bool,
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)
    if not recorded:
        (site / "vllm-0.22.0.dist-info" / "RECORD").unlink()
    damage(site / PATCH)
    before = snapshot(site)
    for command in ("status", "verify", "apply", "revert"):
        code = cli.main([command, "--site", str(site), "--dry-run"])
        said = "".join(capsys.readouterr())
        assert "0.0.1 (unreleased)" in said
        assert code == Exit.FOREIGN, said
        assert PATCH in said
        assert "reinstall vllm 0.22.0" in said
        assert "or nothing" not in said
        assert "make refresh" not in said
        assert "`revert`" not in said
    assert snapshot(site) == before


def test_a_file_that_is_strange_to_another_version_is_shown_alone(
    tmp_path: Path, ours: Overlay, capsys: pytest.CaptureFixture[str]
) -> None:
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)
    for path in ("vllm/one.py", f"{PACKAGE}/a.py"):
        kept = (site / path).read_bytes()
        (site / path).write_bytes(kept + b"# mine\n")
        assert cli.main(["status", "--site", str(site)]) == Exit.FOREIGN
        shown = capsys.readouterr().out
        assert "0.22.0, foreign to overlay 0.0.1 (unreleased)\n" in shown
        assert [line.split()[1] for line in shown.splitlines() if "  foreign " in line] == [path]
        assert sha256(kept) in shown
        before = snapshot(site)
        for command in ("apply", "revert"):
            assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
            said = capsys.readouterr().err
            assert f"{site / path}: is " in said
            assert "overlay 0.0.1 (unreleased)" in said
            assert "more)" not in said
        assert snapshot(site) == before
        (site / path).write_bytes(kept)
    assert cli.main(["apply", "--site", str(site)]) == Exit.DONE


def test_the_table_of_releases_is_read_strictly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins, "RELEASES", tmp_path / "RELEASES")
    for text in (None, "[other]\n", f"{sha256(b'')}  vllm/x.py\n", "[pins]\nnonsense\n"):
        if text is not None:
            pins.RELEASES.write_text(text)
        with pytest.raises(OverlayError) as caught:
            pins.releases()
        assert caught.value.code is Exit.FAULT


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        # An address holds 108 bytes, which the whole path may be longer than.
        server.bind(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_directory(path: Path) -> None:
    path.mkdir()


def a_huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


PLACES = [
    f"{PACKAGE}/provenance/VERSION_PIN",
    f"{PACKAGE}/provenance/patches/series",
    f"{PACKAGE}/provenance/patches/0001-all.patch",
    f"{PACKAGE}/a.py",
    "vllm/one.py",
    "vllm-0.22.0.dist-info/RECORD",
    "vllm/__pycache__/one.cpython-399.pyc",
]
ODD = [a_socket, a_device, a_directory, a_huge_file]
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
    [*((place, a_pipe) for place in PLACES), *itertools.product([PLACES[0], PLACES[-3]], ODD)],
)
def test_nothing_is_waited_for_that_is_no_plain_file(
    tmp_path: Path, ours: Overlay, place: str, put: Callable[[Path], None]
) -> None:
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)  # by another version: all is read
    (site / "vllm" / "__pycache__").mkdir(exist_ok=True)
    (site / place).unlink(missing_ok=True)
    put(site / place)
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in site.rglob("*"))
    foreign(site, ours, "verify", "status", "apply", "revert")
    assert sorted((str(path), path.lstat().st_mtime_ns) for path in site.rglob("*")) == before


@pytest.mark.parametrize("put", [a_pipe, a_huge_file])
@pytest.mark.parametrize("name", ["METADATA", "RECORD", "direct_url.json", "_version.py"])
def test_nothing_is_waited_for_that_is_only_shown(
    tmp_path: Path, ours: Overlay, name: str, put: Callable[[Path], None]
) -> None:
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)
    info = site / "vllm-0.22.0.dist-info"
    place = (site / "vllm" if name == "_version.py" else info) / name
    if name == "_version.py":  # It is asked where there is no metadata.
        shutil.rmtree(info)
        (site / "vllm" / "__init__.py").touch()
    place.unlink(missing_ok=True)
    put(place)
    foreign(site, ours, "verify", "status")


def foreign(site: Path, overlay: Overlay, *commands: str) -> None:
    """Each command says so; the limit only turns a wait without end into a failure."""
    command = [sys.executable, "-c", COMMANDS, *map(str, (REPO / "scripts", overlay.root, site))]
    done = subprocess.run([*command, *commands], timeout=60, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("put", [a_pipe, a_directory, lambda path: path.symlink_to("nowhere")])
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
    site = laid(tmp_path, mini.PRISTINE, mini.OVERLAID)
    if not older:
        assert cli.main(["apply", "--site", str(site)]) == Exit.DONE
    for path, next_step in (
        ("vllm-0.22.0.dist-info/RECORD", "put the installer's RECORD back, or reinstall"),
        (f"{PACKAGE}/a.py", "move it away"),
    ):
        kept = (site / path).read_bytes()
        (site / path).unlink()
        put(site / path)
        assert cli.main([command, "--site", str(site)]) == Exit.FOREIGN
        said = "".join(capsys.readouterr())
        assert next_step in said
        assert "is not a file of the overlay" not in said
        (site / path).rmdir() if (site / path).is_dir() else (site / path).unlink()
        (site / path).write_bytes(kept)
