"""Upstream's Python files, from an installation or a pinned wheel."""

from __future__ import annotations

import errno
import hashlib
import stat
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.files import read as read_file
from overlay.installation import Installation
from overlay.pin import PACKAGE
from overlay.refusal import refuse_foreign
from overlay.source import Overlay
from overlay.state import inspect


@dataclass(frozen=True)
class Upstream:
    """Upstream's Python files; those that the pin lists are proven."""

    paths: tuple[str, ...]  #: All modules of the vllm package, relative to site-packages.
    read: Callable[[str], bytes]  #: Returns the bytes of one of them.
    metadata: str = ""  #: METADATA of the distribution; empty if it is not known.


def from_installation(installation: Installation, overlay: Overlay) -> Upstream:
    """Upstream's files from an installation, pristine or overlaid.

    Raises:
        OverlayError: a pinned file there is foreign.
    """
    inspection = inspect(installation, overlay)
    refuse_foreign(inspection)
    site = installation.site

    def read(path: str) -> bytes:
        if path in overlay.pin.upstream:
            return inspection.pristine(path)
        return read_file(site / path)

    files = (path.relative_to(site).as_posix() for path in (site / "vllm").rglob("*.py"))
    paths = tuple(sorted(f for f in files if not f.startswith(PACKAGE + "/")))
    return Upstream(paths, read, _metadata(installation.record))


def _metadata(record: Path | None) -> str:
    file = record and record.with_name("METADATA")
    return file.read_text(errors="replace") if file and file.is_file() else ""


def from_wheel(wheel: Path, overlay: Overlay) -> Upstream:
    """Upstream's files from a wheel whose checksum is pinned.

    Raises:
        OverlayError: the checksum is not pinned, or the file is not a wheel.
    """
    digest = digest_of(wheel)
    if digest not in overlay.pin.archives.values():
        raise OverlayError(
            Exit.RELEASE,
            "is not one of the pinned archives",
            subject=wheel,
            expected="one that VERSION_PIN lists under [archives]",
            found=f"SHA-256 {digest}",
            next_step=f"download the wheel of vLLM {overlay.pin.release}",
        )
    if not zipfile.is_zipfile(wheel):
        raise OverlayError(
            Exit.USAGE,
            "is a pinned archive, but not a wheel",
            subject=wheel,
            next_step="name a wheel of the release",
        )
    archive = zipfile.ZipFile(wheel)
    names = (n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py"))
    return Upstream(tuple(sorted(names)), archive.read)


def digest_of(wheel: Path) -> str:
    """The SHA-256 of a wheel file, in lower-case hexadecimal.

    Raises:
        OverlayError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        _refuse_special(wheel)
        with wheel.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise OverlayError(
            Exit.USAGE,
            f"cannot be read ({error.strerror})",
            subject=wheel,
            next_step="name a wheel file",
        ) from None
    return digest.hexdigest()


def _refuse_special(path: Path) -> None:
    """Raise OSError for a pipe, a device or a directory: it could block, or have no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is not a plain file")
