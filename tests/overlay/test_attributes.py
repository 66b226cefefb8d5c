"""Mode, owner, ACL and extended attributes of a file are those of the file it replaces."""

import os
import stat
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE
from overlay.source import Overlay
from support import mini, nobody
from support.sites import run, snapshot

ONE, TWO = mini.PRISTINE
RECORD = f"{mini.INFO}/RECORD"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may set this attribute")
_UNNAMED = 0xFFFFFFFF


def acl(user: int, named: int, group: int, mask: int, other: int) -> bytes:
    """An ACL as the kernel takes it, in which ``named`` is for user 1234 (acl(5))."""
    entries = [(1, user, _UNNAMED), (2, named, 1234), (4, group, _UNNAMED)]
    entries += [(0x10, mask, _UNNAMED), (0x20, other, _UNNAMED)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
SHARED = acl(6, 6, 4, 6, 0)  # User 1234 may write; the group may only read.


def give(path: Path, name: str, value: bytes) -> None:
    """Set an attribute, or skip the test where the file system has none."""
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"no {name} on the file system of {path}: {error.strerror}")


def traits(path: Path) -> tuple[int, int, int, Mapping[str, bytes]]:
    status = path.stat()
    attributes = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    return status.st_mode, status.st_uid, status.st_gid, attributes


@pytest.fixture
def site(tmp_path: Path, ours: Overlay) -> Path:
    """A small installation; the command line works with a small overlay."""
    return mini.install(tmp_path / "site")


def change(site: Path, *options: str) -> None:
    for command in ("apply", "revert"):
        before = {path: traits(site / path) for path in (ONE, TWO, RECORD)}
        run(command, "--site", site, *options, code=Exit.DONE)
        assert {path: traits(site / path) for path in before} == before, command


def test_mode_and_owner_stay(site: Path) -> None:
    (site / ONE).chmod(0o640)
    if os.geteuid() == 0:
        os.chown(site / ONE, 1234, 2345)
    change(site)


CAPABILITY = struct.pack("<IIIII", 0x02000000, 1, 0, 0, 0)
OPEN = acl(7, 7, 7, 7, 7)
#: Path, name and value of each attribute that is given.
GIVEN = {
    "a user's own": [(path, "user.note", b"mine") for path in (ONE, RECORD)],
    "one without a value": [(path, "user.empty", b"") for path in (ONE, RECORD)],
    "a label": [(ONE, "security.selinux", b"system_u:object_r:lib_t:s0\0")],
    "a capability": [(ONE, "security.capability", CAPABILITY)],
    "a trusted one": [(ONE, "trusted.note", b"theirs")],
    "an ACL": [(path, ACCESS, SHARED) for path in (ONE, RECORD)],
    "no ACL of the directory": [
        *((folder, DEFAULT, OPEN) for folder in ("vllm", "vllm/v1", mini.INFO)),
        (ONE, ACCESS, SHARED),
    ],
}


@pytest.mark.parametrize("kind", GIVEN)
def test_an_attribute_stays(site: Path, kind: str) -> None:
    for path, name, value in GIVEN[kind]:
        if name.startswith(("security", "trusted")) and os.geteuid() != 0:
            pytest.skip("only root may set this attribute")
        give(site / path, name, value)
    assert stat.S_IMODE((site / ONE).stat().st_mode) == (0o660 if "ACL" in kind else 0o644)
    change(site)


def test_our_own_files_are_for_the_same_people(site: Path) -> None:
    """A mask taken for the group's permissions would let the group write to them."""
    give(site / ONE, ACCESS, SHARED)
    give(site / "vllm" / "v1", ACCESS, acl(7, 7, 5, 7, 0))
    give(site / ONE, "user.note", b"about this file")
    run("apply", "--site", site, "--python", sys.executable, code=Exit.DONE)
    ours = [path for path in (site / PACKAGE).rglob("*") if path.is_file()]
    assert {path.suffix for path in ours} > {".py", ".pyc", ".patch"}
    for path in [*ours, *(site / "vllm" / "__pycache__").glob("one.*")]:
        assert os.getxattr(path, ACCESS) == SHARED, path
        assert os.listxattr(path) == [ACCESS], path
    for path in (site / PACKAGE, *(p for p in (site / PACKAGE).rglob("*") if p.is_dir())):
        assert os.getxattr(path, ACCESS) == acl(7, 7, 5, 7, 0), path


@ROOT_ONLY
@pytest.mark.parametrize("name", ["security.ima", "security.evm"])
def test_a_seal_on_the_bytes_is_refused(site: Path, name: str) -> None:
    give(site / TWO, name, b"\x03" + bytes(20))
    before = snapshot(site, bytecode=True)
    message = run("apply", "--site", site, code=Exit.DENIED).stderr
    assert f"{site / TWO}: the extended attribute {name} depends on its bytes" in message
    assert "nothing was written" in message
    assert snapshot(site, bytecode=True) == before


@pytest.fixture
def as_nobody(site: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Runs a command as nobody, who owns the installation: its exit code and stderr."""
    for path in (site, *site.rglob("*")):
        os.chown(path, nobody.ID, nobody.ID)
    nobody.admit(tmp_path)
    return lambda command, *options: nobody.run(tmp_path, command, "--site", str(site), *options)


@ROOT_ONLY
def test_an_attribute_that_cannot_be_kept_is_refused(
    site: Path, as_nobody: Callable[[str], tuple[int, str]]
) -> None:
    """Only root may set a label, and somebody else runs the tool."""
    give(site / TWO, "security.label", b"secret")
    before = snapshot(site, bytecode=True)
    code, message = as_nobody("apply")
    assert code == Exit.DENIED, message
    assert f"{site / TWO}: the extended attribute security.label cannot be kept" in message
    assert "nothing was written" in message
    assert snapshot(site, bytecode=True) == before


@ROOT_ONLY
def test_a_note_stays_on_a_file_that_its_owner_may_not_write(
    site: Path, as_nobody: Callable[[str], tuple[int, str]]
) -> None:
    give(site / ONE, "user.note", b"mine")
    give(site / TWO, ACCESS, acl(4, 6, 4, 4, 0))
    (site / ONE).chmod(0o444)
    before = {path: traits(site / path) for path in (ONE, TWO)}
    for command in ("apply", "revert"):
        code, message = as_nobody(command)
        assert code == Exit.DONE, message
        assert {path: traits(site / path) for path in before} == before, command
