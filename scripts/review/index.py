"""The package index that uv is configured for: archives of a release, listed and downloaded.

uv's settings apply (``uv.toml``, ``UV_DEFAULT_INDEX``, ``UV_FIND_LINKS`` and the like), as in
`make tools`. Nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx2
from environment.children import children_environment
from environment.making import find_uv
from overlay.errors import Exit, OverlayError, denied
from packaging.version import Version
from series.upstream import digest_of

_COMPILE = ("--no-deps", "--universal", "--format", "pylock.toml", "--quiet", "-")


@dataclass(frozen=True)
class Archive:
    """A wheel or a source archive that the index lists.

    Attributes:
        url: its address.
        sha256: as the index states it, in lower-case hexadecimal.
    """

    url: str
    sha256: str

    @property
    def name(self) -> str:
        """The file name."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def archives(project: str, version: Version | None = None) -> tuple[Version, list[Archive]] | None:
    """List the wheels and the source archive of a release, of any machine.

    Args:
        project: the distribution.
        version: of the release; by default the newest final one that was not withdrawn.

    Returns:
        The version and the archives; None if the index lists no such release.

    Raises:
        OverlayError: the index cannot be asked.
    """
    wanted = f"{project}=={version}" if version else project
    final = ["--prerelease", "allow" if version else "disallow"]
    done = subprocess.run(
        [find_uv(), "pip", "compile", "--python", sys.executable, *final, *_COMPILE],
        input=wanted,
        capture_output=True,
        text=True,
        check=False,
        env=children_environment(),
    )
    if done.returncode == 1 and "network was disabled" not in done.stderr:
        return None
    if done.returncode:
        raise OverlayError(
            Exit.ABSENT,
            f"the package index could not be asked for {wanted} ({' '.join(done.stderr.split())})",
            next_step="check uv's configuration and the network, or name a wheel file "
            "and give SHA256=its checksum",
        )
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    (package,) = toml.loads(done.stdout)["packages"]
    files = [*package.get("wheels", ()), *filter(None, [package.get("sdist")])]
    found = {file["url"]: file["hashes"].get("sha256", "") for file in files}
    return Version(package["version"]), [Archive(url, digest) for url, digest in found.items()]


def download(archive: Archive, sha256: str, folder: Path) -> Path:
    """Download an archive into ``folder``, unless it is there; on failure nothing is left.

    Raises:
        OverlayError: it cannot be had, or its checksum is not ``sha256``.
    """
    target = folder / archive.name
    if target.is_file() and digest_of(target) == sha256:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.resolve()) as aside:
            file = Path(aside, target.name)
            with file.open("wb") as sink:
                for block in _blocks(archive.url):
                    sink.write(block)
            if (digest := digest_of(file)) != sha256:
                raise unproven(archive.name, digest, sha256, "it is not the archive that is wanted")
            file.replace(target)
    except httpx2.HTTPError as error:
        raise OverlayError(
            Exit.ABSENT,
            f"could not be downloaded ({error})",
            subject=archive.name,
            next_step="run it again, or name a wheel file and give SHA256=its checksum",
        ) from None
    except OSError as error:
        raise denied(error, "the release was not fetched") from None
    return target


def _blocks(url: str) -> Iterator[bytes]:
    if urlsplit(url).scheme == "file":
        with Path(unquote(urlsplit(url).path)).open("rb") as file:
            yield from iter(lambda: file.read(1 << 20), b"")
        return
    with httpx2.stream("GET", url, follow_redirects=True, timeout=60) as answer:
        answer.raise_for_status()
        yield from answer.iter_raw(1 << 20)


def fetch_sdist(project: str, version: str, sha256: str, folder: Path) -> Path:
    """Download the source archive of a release into ``folder``, and prove it.

    Raises:
        OverlayError: the index lists none, cannot be asked, or has another one.
    """
    _, listed = archives(project, Version(version)) or (None, [])
    if found := [archive for archive in listed if archive.name.endswith(".tar.gz")]:
        return download(found[0], sha256, folder)
    raise OverlayError(
        Exit.ABSENT,
        f"the package index lists no source archive of {project} {version}",
        next_step="see uv's configuration for the index, and name one that has it",
    )


def unproven(
    subject: Path | str, digest: str | None, expected: str | None, reason: str
) -> OverlayError:
    """Return the refusal of an archive whose checksum is not, or cannot be, confirmed."""
    return OverlayError(
        Exit.RELEASE,
        f"is not proven: {reason}",
        subject=subject,
        expected=expected and f"SHA-256 {expected}",
        found=f"SHA-256 {digest}" if digest else "no checksum",
        next_step="download it anew, or, if you know its checksum from somewhere, "
        "name the file and give SHA256=that",
    )
