"""Mode, owner and extended attributes, which replacements keep."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

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
