"""Read, write and remove files, without following what must not be followed.

Nothing is written in place and nothing is written through a link, so the file in a
package cache that a target is linked to stays as it was. Only functions of ``os``
are called, one system call each, so that tests can cut a run off at every one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from overlay.traits import Traits, give

#: The names of staged files and directories begin with this. Where one version replaces another,
#: the files of both are staged at once, and the names continue with one of these.
STAGED = ".readiness-overlay-"
COMING, GOING = f"{STAGED}new-", f"{STAGED}old-"

#: No file of the overlay comes near this size; a larger one is not read.
LARGEST = 64 << 20

#: FS_IOC_GETFLAGS, and the flags that even root's changes stop at (ioctl_iflags(2)).
_GET_FLAGS = 0x80086601
_FLAGS = {0x10: "is immutable (chattr +i)", 0x20: "is append-only (chattr +a)"}


def special(mode: int) -> str | None:
    """A phrase for a file that is not regular, or None for a regular file."""
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a special file"


def read(path: Path) -> bytes:
    """The bytes of a regular file, or of the regular file that a link leads to.

    Raises:
        OSError: no permission, or no such file; or a pipe, a device or a directory,
            which could block without end; or a very large file.
    """
    _require_regular(path, path.stat())  # Opening a device may already do something.
    with open(path, "rb", opener=_open_without_blocking) as file:
        _require_regular(path, os.fstat(file.fileno()))
        return file.read()


def head(path: Path, size: int) -> bytes:
    """The first ``size`` bytes of a regular file; none of anything that may not be read."""
    try:
        with open(path, "rb", opener=_open_without_blocking) as file:
            return file.read(size) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def holds(path: Path, data: bytes | None) -> bool:
    """Whether the file at ``path`` has the bytes ``data``; for None, whether there is none."""
    try:
        with open(path, "rb", opener=_open_without_blocking) as file:
            status, now = os.fstat(file.fileno()), path.stat()
            same = os.path.samestat(status, now) and stat.S_ISREG(status.st_mode)
            return same and data is not None and file.read(len(data) + 1) == data
    except FileNotFoundError:
        return data is None and not os.path.lexists(path)


def unchangeable(path: Path) -> str | None:
    """Why nobody, not even root, can change a file or directory; None if nothing is known."""
    if not os.path.lexists(path) or os.path.islink(path):
        return None
    try:
        with _opened(path, os.O_RDONLY | os.O_NONBLOCK) as handle:
            flags = int.from_bytes(fcntl.ioctl(handle, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
    except OSError:  # The file system has no flags.
        return None
    return next((word for flag, word in _FLAGS.items() if flags & flag), None)


def mount_points() -> set[str]:
    """Where file systems, directories and single files are mounted (proc(5), mountinfo)."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split(b" ")[4] for line in file]
    except OSError:
        return set()
    return {
        os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), point))
        for point in points
    }


def _require_regular(path: Path, status: os.stat_result) -> None:
    if word := special(status.st_mode):
        raise OSError(errno.EINVAL, f"is {word}, and not a plain file", str(path))
    if status.st_size > LARGEST:
        raise OSError(errno.EFBIG, f"is {status.st_size} bytes long", str(path))


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@contextmanager
def _opened(path: Path, flags: int, mode: int = 0) -> Iterator[int]:
    """Open a file or directory; errors of calls on the handle name it."""
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
        OSError: the file exists, or no permission, or no space; or the owner or an
            attribute cannot be kept.
    """
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as handle:
        view = memoryview(data)
        while view:
            view = view[os.write(handle, view) :]
        give(handle, path, like)
        os.fsync(handle)


def finish_bytecode(path: Path, like: Traits) -> None:
    """Give bytecode the traits of its source, without execute bits, and sync it."""
    with _opened(path, os.O_RDONLY) as handle:
        give(handle, path, replace(like, mode=like.mode & 0o666))
        os.fsync(handle)


def make_directory(path: Path, like: Traits) -> None:
    """Create a directory with the traits ``like``."""
    os.mkdir(path, 0o700)
    with _opened(path, os.O_RDONLY | os.O_DIRECTORY) as handle:
        give(handle, path, like)


def sync(directory: Path) -> None:
    """Make new names and removals in ``directory`` durable."""
    with _opened(directory, os.O_RDONLY | os.O_DIRECTORY) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Some FUSE and CIFS mounts cannot sync one.
                raise


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with its contents, if it exists."""
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
    """Remove a directory and its subdirectories, except those that hold more than bytecode.

    What is staged there stays.
    """
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        if name == "__pycache__":
            _empty(folder / name)
        elif not (folder / name).is_symlink():
            prune(folder / name)
    remove_if_empty(folder)


def _empty(folder: Path) -> None:
    """Remove a directory of bytecode, as far as nothing is staged in it."""
    names = os.listdir(folder) if folder.is_dir() and not folder.is_symlink() else []
    staged = [name for name in names if name.startswith(STAGED)]
    for name in sorted(set(names) - set(staged)) if staged else []:
        remove(folder / name)
    if not staged:
        remove(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove a directory if it exists and is empty."""
    if folder.is_dir() and not os.listdir(folder):
        os.rmdir(folder)


def staged_path(final: Path, prefix: str = STAGED) -> Path:
    """The path at which the new contents of ``final`` are staged."""
    return final.with_name(prefix + final.name)


def staged_in(folder: Path, prefix: str = STAGED) -> list[Path]:
    """Whatever is staged in a directory, which need not exist, sorted by name."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(folder / name for name in names if name.startswith(prefix))
