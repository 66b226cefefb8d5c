"""Read, write and remove files; mode, owner and extended attributes, which replacements keep.

Nothing is written in place or through a link: a target may be linked to a file of a package cache,
which must not change. Each change is one ``os`` function and one system call, so that tests can
interrupt a run before every change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

#: Prefix of the names of staged files and directories.
STAGED = ".readiness-overlay-"

#: Size limit of the files that are read, in bytes.
LARGEST = 64 << 20

_ACCESS_ACL = "system.posix_acl_access"
_ACLS = (_ACCESS_ACL, "system.posix_acl_default")

#: Attributes that hold a checksum or signature of a file's bytes, and are invalid for other bytes.
_SEALS = ("security.ima", "security.evm")


@dataclass(frozen=True)
class Traits:
    """Properties that a file's replacement keeps.

    ``mode`` has the permission bits; with an ACL, the group's bits are the ACL's mask. ``owner``
    has the ids of user and group. ``attributes`` include ACLs, security labels and user attributes.
    """

    mode: int
    owner: tuple[int, int]
    attributes: Mapping[str, bytes]

    @property
    def permissions(self) -> Traits:
        """Traits for a new file in the same directory: mode, owner and ACLs only."""
        kept = {name: value for name, value in self.attributes.items() if name in _ACLS}
        return replace(self, attributes=kept)


def traits(path: Path) -> Traits:
    """Read the traits of ``path``; links are followed.

    Raises:
        OSError: no permission, or an attribute is a checksum or signature of the file's bytes.

    >>> traits(Path("/")).owner
    (0, 0)
    """
    status, attributes = os.stat(path), _attributes(path)
    if seal := next((name for name in _SEALS if name in attributes), None):
        reason = f"the extended attribute {seal} depends on its bytes, and cannot be kept"
        raise OSError(errno.EPERM, reason, str(path))
    return Traits(stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), attributes)


def give(handle: int, path: Path, like: Traits) -> None:
    """Set the traits of an open file; ``path`` is for errors.

    The order matters: a change of owner clears bits of the mode, a user's attributes need a
    writable file, and a change of mode changes an ACL's mask. An ACL inherited from the directory
    is removed.

    Raises:
        OSError: the owner or an attribute cannot be set.

    >>> with open("new", "wb") as file:
    ...     give(file.fileno(), Path("new"), traits(site / "vllm/one.py"))
    >>> traits(Path("new")) == traits(site / "vllm/one.py")
    True
    """
    now = os.fstat(handle)
    if (now.st_uid, now.st_gid) != like.owner:
        os.fchown(handle, *like.owner)
    present = _attributes(handle)
    if _ACCESS_ACL in present and _ACCESS_ACL not in like.attributes:
        os.removexattr(handle, _ACCESS_ACL)
    for name, value in like.attributes.items():
        if name not in _ACLS and present.get(name) != value:
            _set(handle, path, name, value)
    os.fchmod(handle, like.mode)
    for name, value in like.attributes.items():
        if name in _ACLS:
            _set(handle, path, name, value)


def _attributes(file: Path | int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(file, name) for name in os.listxattr(file)}
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return {}


def _set(handle: int, path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(handle, name, value)
    except OSError as error:
        reason = f"the extended attribute {name} cannot be kept: {error.strerror}"
        raise OSError(error.errno, reason, str(path)) from None


def odd(status: os.stat_result) -> str | None:
    """Return a phrase for a file that is not read; None for a regular one of usual size.

    >>> odd(os.stat("/dev/null"))
    'a special file'
    """
    if stat.S_ISREG(status.st_mode):
        too_large = f"a file of {status.st_size} bytes, too large (at most {LARGEST})"
        return too_large if status.st_size > LARGEST else None
    return "a directory" if stat.S_ISDIR(status.st_mode) else "a special file"


def read(path: Path, size: int = -1) -> bytes:
    """Read a regular file, or its first ``size`` bytes; links are followed.

    Raises:
        OSError: also for a pipe, a device, a directory, or a file larger than :data:`LARGEST`.

    >>> read(site / "vllm/one.py", 5)
    b'A = 1'
    """
    _require_regular(path, path.stat())  # Opening a device may have side effects.
    with open(path, "rb", opener=_open_without_blocking) as file:
        _require_regular(path, os.fstat(file.fileno()))
        return file.read(size)


def head(path: Path, size: int) -> bytes:
    """Read the first ``size`` bytes of a regular file; empty if unreadable.

    >>> head(Path("missing"), 5)
    b''
    """
    try:
        return read(path, size)
    except OSError:
        return b""


def holds(path: Path, data: bytes | None) -> bool:
    """Return whether a file has the bytes ``data``, or is absent if None; OSError as for `read`.

    >>> holds(Path("missing"), None)
    True
    """
    try:
        return read(path) == data
    except FileNotFoundError:
        return data is None and not os.path.lexists(path)


def _require_regular(path: Path, status: os.stat_result) -> None:
    if word := odd(status):
        kind = "" if stat.S_ISREG(status.st_mode) else ", and not a plain file"
        raise OSError(errno.EINVAL, f"is {word}{kind}", str(path))


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    """Open a file or directory; an OSError in the context gets its path."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW, mode)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        error.filename = str(path)
        raise


def write(path: Path, data: bytes, like: Traits) -> None:
    """Create a file with ``data`` and the traits ``like``, and sync it.

    Raises:
        OSError: also if the file exists, or the owner or an attribute cannot be kept.

    >>> write(Path("new"), b"text", traits(site / "vllm/one.py"))
    >>> read(Path("new"))
    b'text'
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as handle:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        give(handle, path, like)
        os.fsync(handle)


def finish_bytecode(path: Path, like: Traits) -> None:
    """Give bytecode the traits of its source, without execute bits, and sync it.

    >>> finish_bytecode(site / "vllm/one.py", traits(site))
    >>> traits(site / "vllm/one.py").mode & 0o111
    0
    """
    with _opened(path, os.O_RDONLY) as handle:
        give(handle, path, replace(like, mode=like.mode & 0o666))
        os.fsync(handle)


def make_directory(path: Path, like: Traits) -> None:
    """Create a directory with the mode and ownership in ``like``.

    >>> make_directory(Path("new"), traits(site))
    >>> traits(Path("new")) == traits(site)
    True
    """
    os.mkdir(path, 0o700)
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as handle:
        give(handle, path, like)


def sync(directory: Path) -> None:
    """Make new names and removals in ``directory`` durable.

    >>> sync(site)
    """
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Some FUSE and CIFS mounts cannot sync directories.
                raise


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its contents, if it exists.

    >>> remove(site / "vllm")
    >>> os.listdir(site)
    ['vllm-0.22.0.dist-info']
    """
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_directory:
        os.unlink(path)
        return
    for name in sorted(os.listdir(path)):
        remove(path / name)
    os.rmdir(path)


def prune(folder: Path) -> None:
    """Remove bytecode and empty directories from a tree; keep other files.

    >>> (site / "vllm/__pycache__").mkdir()
    >>> prune(site)
    >>> sorted(os.listdir(site / "vllm"))
    ['__init__.py', 'one.py', 'v1']
    """
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        if name == "__pycache__":
            remove(folder / name)
        elif not (folder / name).is_symlink():
            prune(folder / name)
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a directory if it exists and is empty.

    >>> remove_if_empty(site)
    >>> site.is_dir()
    True
    """
    if folder.is_dir() and not os.listdir(folder):
        os.rmdir(folder)


def staged_path(final: Path) -> Path:
    """Return the staging path of ``final``.

    >>> str(staged_path(Path("vllm/envs.py")))
    'vllm/.readiness-overlay-envs.py'
    """
    return final.with_name(STAGED + final.name)


def staged_in(folder: Path) -> list[Path]:
    """Return the staged files in a directory, sorted by name; empty without a directory.

    >>> staged_in(site)
    []
    """
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(folder / name for name in names if name.startswith(STAGED))
