"""Every look at a file's bytes, and every change: stage beside the target, sync, rename.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from overlay.errors import Exit, OverlayError

#: Staged files and directories are called so until they are renamed into place.
STAGED = ".readiness-overlay-"

#: No file that the overlay knows is larger by far; a larger one is not read.
LARGEST = 64 << 20

_ACCESS_ACL = "system.posix_acl_access"
_ACLS = (_ACCESS_ACL, "system.posix_acl_default")

#: Checksums and signatures of a file's bytes: other bytes cannot keep them.
_SEALS = ("security.ima", "security.evm")


@dataclass(frozen=True)
class Traits:
    """What a file that replaces another has in common with it.

    Attributes:
        mode: the permission bits; with an ACL, those of the group are its mask.
        owner: the user's and the group's id.
        attributes: extended attributes by name: ACLs, security labels, the user's own.
    """

    mode: int
    owner: tuple[int, int]
    attributes: Mapping[str, bytes]

    @property
    def of_another(self) -> Traits:
        """Those for a file beside it with contents of its own: who may read and write it."""
        kept = {name: value for name, value in self.attributes.items() if name in _ACLS}
        return replace(self, attributes=kept)


def traits(path: Path) -> Traits:
    """What a replacement of ``path``, or of what a link leads to, must have.

    Raises:
        OSError: it cannot be looked at, or has an attribute that no other bytes can have.
    """
    status, attributes = os.stat(path), _attributes(path)
    if seal := next((name for name in _SEALS if name in attributes), None):
        reason = f"the extended attribute {seal} vouches for its bytes, and cannot be kept"
        raise OSError(errno.EPERM, reason, str(path))
    return Traits(stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), attributes)


def _attributes(file: Path | int) -> dict[str, bytes]:
    try:
        return {name: os.getxattr(file, name) for name in os.listxattr(file)}
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # The file system has none.
            raise
        return {}


def _dress(handle: int, path: Path, like: Traits) -> None:
    """Give an open file its traits.

    The order matters: a change of owner clears bits of the mode, only a file that may be
    written takes a user's attributes, and a change of mode changes an ACL's mask. A new
    file may have got an ACL from its directory.
    """
    now = os.fstat(handle)
    if (now.st_uid, now.st_gid) != like.owner:
        os.fchown(handle, *like.owner)
    present = _attributes(handle)
    if _ACCESS_ACL in present and _ACCESS_ACL not in like.attributes:
        os.removexattr(handle, _ACCESS_ACL)
    for name, value in like.attributes.items():
        if name not in _ACLS and present.get(name) != value:
            _give(handle, path, name, value)
    os.fchmod(handle, like.mode)
    for name, value in like.attributes.items():
        if name in _ACLS:
            _give(handle, path, name, value)


def _give(handle: int, path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(handle, name, value)
    except OSError as error:
        reason = f"the extended attribute {name} cannot be kept: {error.strerror}"
        raise OSError(error.errno, reason, str(path)) from None


#: FS_IOC_GETFLAGS, and the flags that even root's changes stop at (ioctl_iflags(2)).
_GET_FLAGS = 0x80086601
_FLAGS = {0x10: "is immutable (chattr +i)", 0x20: "is append-only (chattr +a)"}


def kind(mode: int) -> str | None:
    """What a file of this mode is, in words, or None if it is a plain file."""
    if stat.S_ISREG(mode):
        return None
    return "a directory" if stat.S_ISDIR(mode) else "a special file"


def read(path: Path) -> bytes:
    """The bytes of a plain file, or of the plain file that a link leads to.

    Raises:
        OSError: no permission, or no such file; also where it is a pipe, a device or
            a directory, which might be waited for without end, or is very large.
    """
    _plain(path, path.stat())  # To open a device may already do something.
    with open(path, "rb", opener=_without_waiting) as file:
        _plain(path, os.fstat(file.fileno()))
        return file.read()


def _holds(path: Path, data: bytes | None) -> bool:
    """Whether ``data`` lies at ``path``, or nothing if it is None."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status, now = os.fstat(file.fileno()), path.stat()
            same = os.path.samestat(status, now) and stat.S_ISREG(status.st_mode)
            return same and data is not None and file.read(len(data) + 1) == data
    except FileNotFoundError:
        return data is None and not os.path.lexists(path)


def fixed(path: Path) -> str | None:
    """Why a file or a directory cannot be changed by anybody, or None if that is not known."""
    if not os.path.lexists(path) or os.path.islink(path):
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        flags = int.from_bytes(fcntl.ioctl(handle, _GET_FLAGS, bytes(8))[:4], sys.byteorder)
    except OSError:  # The file system has no flags.
        return None
    finally:
        os.close(handle)
    return next((word for flag, word in _FLAGS.items() if flags & flag), None)


def mount_points() -> set[str]:
    """Where file systems, directories and single files are mounted (proc(5), mountinfo)."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [line.split(b" ")[4] for line in file]
    except OSError:
        return set()
    plain = (re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), each) for each in points)
    return {os.fsdecode(each) for each in plain}


def _plain(path: Path, status: os.stat_result) -> None:
    if word := kind(status.st_mode):
        raise OSError(errno.EINVAL, f"is {word}, and not a plain file", str(path))
    if status.st_size > LARGEST:
        raise OSError(errno.EFBIG, f"is {status.st_size} bytes long", str(path))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


class Staging:
    """New files and directories that lie beside their targets until :meth:`commit`.

    As a context manager it takes away what was staged and not committed.

    Attributes:
        begun: whether something has been renamed into place.
    """

    def __init__(self) -> None:
        self.begun = False
        self._found: dict[Path, bytes | None] = {}
        self._like: dict[Path, Traits] = {}
        self._staged: dict[Path, Path] = {}
        self._folders: list[Path] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for staged in self._staged.values():
            remove(staged)
        for folder in [] if self.begun else self._folders:
            remove_if_empty(folder)

    def file(self, final: Path, data: bytes, found: bytes | None) -> None:
        """Stage ``data`` to replace ``final``, where ``found`` lies; see :func:`write`."""
        self._found[final] = found
        self._like[final] = traits(final)
        write(self._stage(final), data, self._like[final])

    def directory(self, final: Path, like: Traits, found: Mapping[Path, bytes | None]) -> Path:
        """Stage an empty directory for ``final``; the caller fills what is returned.

        Args:
            final: where it will lie.
            like: its traits.
            found: the bytes of each file that the directory may replace, None for nothing.
        """
        self._found.update(found)
        staged = self._stage(final)
        make_directory(staged, like)
        return staged

    def folder(self, path: Path) -> None:
        """Make a directory now, for files to be staged in, if it is not there."""
        if not path.is_dir():
            make_directory(path, traits(path.parent).of_another)
            self._folders.append(path)

    def made(self, final: Path, source: Path) -> None:
        """Take over bytecode that a child process made at :func:`staged_path`."""
        self._staged[final] = staged_path(final)
        keep(self._staged[final], traits(source).of_another)

    def newest(self, final: Path) -> Path:
        """Where the contents of ``final`` lie now: staged, or in place."""
        return self._staged.get(final, final)

    def commit(self, finals: Iterable[Path]) -> None:
        """Rename what is staged into place, in this order, and make it last.

        Raises:
            OverlayError: what would be replaced is not what was found.
            OSError: the system refuses.
        """
        for final in finals:
            staged = self._staged[final]
            if staged.is_dir() and os.path.lexists(final):
                self._merge(staged, final)
            else:
                self._replace(staged, final)
                sync(final.parent)
            del self._staged[final]

    def take_away(self, found: Mapping[Path, bytes | None]) -> None:
        """Remove files, in this order, and then the directories that are empty.

        Args:
            found: the bytes of each file, or None where there is none.

        Raises:
            OverlayError: what would be removed is not what was found.
            OSError: the system refuses.
        """
        folders = set()
        for path, data in found.items():
            self._found[path] = data
            self._refuse_change(path)
            self.begun = True
            remove(path)
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
            remove(folder / "__pycache__")
            if remove_if_empty(folder):
                sync(folder.parent)

    def _merge(self, staged: Path, final: Path) -> None:
        """Rename each file of one directory into another, and remove the first.

        An existing directory is not renamed: overlayfs refuses that for one that comes
        from a lower layer of an image (EXDEV).
        """
        for name in sorted(os.listdir(staged)):
            source, target = staged / name, final / name
            if source.is_dir() and target.is_dir():
                self._merge(source, target)
            else:
                self._replace(source, target)
        sync(final)
        os.rmdir(staged)

    def _replace(self, staged: Path, final: Path) -> None:
        self._refuse_change(final)
        self.begun = True
        os.replace(staged, final)

    def _refuse_change(self, final: Path) -> None:
        """Raise if somebody else has changed a file since it was looked at.

        Looked at once more right before it is replaced, which leaves to chance only the
        time between two system calls.
        """
        if final not in self._found or (
            (final not in self._like or (final.exists() and self._like[final] == traits(final)))
            and _holds(final, self._found[final])
        ):
            return
        written = "other files are changed already" if self.begun else "nothing was written"
        raise OverlayError(
            Exit.FOREIGN,
            f"was changed by somebody else during this run, and is left as it is; {written}",
            subject=final,
            next_step="see to it that nobody else works there; `status` says how things are",
        )

    def _stage(self, final: Path) -> Path:
        staged = self._staged[final] = staged_path(final)
        return staged


def staged_path(final: Path) -> Path:
    """Where the new contents of ``final`` are staged."""
    return final.with_name(STAGED + final.name)


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Have errors of calls on an open file name it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write(path: Path, data: bytes, like: Traits) -> None:
    """Make a new file with ``data`` and the traits of ``like``, synced.

    Raises:
        OSError: the file is there already, or no permission, or no space; also
            where the owner or an attribute cannot be kept.
    """
    with _about(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            _dress(handle, path, like)
            os.fsync(handle)
        finally:
            os.close(handle)


def keep(path: Path, like: Traits) -> None:
    """Give bytecode the traits of its source, and sync it."""
    with _about(path):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _dress(handle, path, replace(like, mode=like.mode & 0o666))
            os.fsync(handle)
        finally:
            os.close(handle)


def make_directory(path: Path, like: Traits) -> None:
    """Make a directory with the traits of ``like``."""
    with _about(path):
        os.mkdir(path, 0o700)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _dress(handle, path, like)
        finally:
            os.close(handle)


def sync(directory: Path) -> None:
    """Make new names and removals in ``directory`` last."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Some FUSE and CIFS mounts cannot sync one.
            raise
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all it holds, if it is there."""
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
    """Remove a directory and those in it, as far as they hold nothing but bytecode."""
    if not folder.is_dir():
        return
    for name in sorted(os.listdir(folder)):
        if name == "__pycache__":
            remove(folder / name)
        elif not (folder / name).is_symlink():
            prune(folder / name)
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> bool:
    """Remove a directory that is there and holds nothing; whether it was removed."""
    if not folder.is_dir() or os.listdir(folder):
        return False
    os.rmdir(folder)
    return True
