"""The package index that pip is configured for: archives of a release, found and downloaded.

The settings are those that ``pip config list`` shows: ``pip.conf`` and the ``PIP_*`` variables.
Nothing is built or installed.
"""

from __future__ import annotations

import ast
import logging
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
from environment.children import children_environment
from overlay.errors import Exit, OverlayError, denied
from packaging.version import Version
from series.upstream import digest_of
from unearth import Link, Package, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.errors import HashMismatchError, UnpackError
from unearth.fetchers import DEFAULT_MAX_RETRIES, Fetcher, PyPIClient

STATED = "the package index's checksum"
LOCAL = "the checksum of a local file that pip is configured to use"

_TRUE = ("1", "true", "yes", "on", "y", "t")
#: The index has no such project, or shows it to nobody.
_NOT_LISTED = (403, 404)

logging.getLogger("unearth").addHandler(logging.NullHandler())  # or warnings reach stderr


@dataclass(frozen=True)
class Archive:
    """A wheel or a source archive that the index lists.

    Attributes:
        link: its address.
        sha256: as the index states it, or of a local file; None if the index states none.
        proof: where ``sha256`` comes from.
    """

    link: Link
    sha256: str | None
    proof: str

    @property
    def name(self) -> str:
        """The file name."""
        return self.link.filename


class PackageIndex:
    """Everything that pip would search: indexes, find-links pages and local folders.

    Raises:
        OverlayError: pip's configuration cannot be read.
    """

    def __init__(self) -> None:
        settings = _pip_settings()
        default = PackageFinder().sources[0]["url"]  # an empty finder knows it
        indexes = [settings.get("index-url", default)]
        indexes += settings.get("extra-index-url", "").split()
        if settings.get("no-index", "").lower() in _TRUE:
            indexes = []
        self._client = _Client(settings, indexes)
        # unearth's own client does not fit its protocol to the letter either.
        fetcher = cast("Fetcher", self._client)
        self._finder = PackageFinder(fetcher, ignore_compatibility=True)
        self._finder.sources = [{"url": url, "type": "index"} for url in indexes]
        for place in settings.get("find-links", "").split():
            path = Path(place).expanduser()
            if "://" in place or path.exists():
                self._finder.add_find_links(place if "://" in place else str(path))

    def archives(self, projects: Iterable[str], version: Version) -> list[Archive]:
        """All wheels and source archives of a release, of any Python and machine.

        Args:
            projects: the distributions, those of the first one first.
            version: of the release.

        Raises:
            OverlayError: there are none, and an index did not answer.
        """
        found = self._found([f"{project}=={version}" for project in projects], True)
        return [_archive(each.link) for each in found]

    def versions(self, project: str) -> list[Version]:
        """The versions of a project that have been released, oldest first.

        Raises:
            OverlayError: there are none, and an index did not answer.
        """
        found = self._found([project], False)
        return sorted({Version(each.version) for each in found if each.version})

    def _found(self, wanted: Sequence[str], prereleases: bool) -> list[Package]:
        self._client.failure = ""
        matches = (self._finder.find_matches(e, allow_prereleases=prereleases) for e in wanted)
        packages = [package for found in matches for package in found]
        if not packages and self._client.failure:
            raise OverlayError(
                Exit.ABSENT,
                f"the package index could not be asked for {' and '.join(wanted)} "
                f"({self._client.failure})",
                next_step="check pip's configuration and the network, or name a wheel file "
                "and give SHA256=its checksum",
            )
        return packages

    def download(self, archive: Archive, sha256: str, folder: Path) -> Path:
        """Download an archive into ``folder``, unless it is there; on failure nothing is left.

        Args:
            archive: one of :meth:`archives`.
            sha256: its checksum, in lower-case hexadecimal.
            folder: made if need be.

        Raises:
            OverlayError: it cannot be had, or has another checksum.
        """
        target = folder / archive.name
        if target.is_file() and digest_of(target) == sha256:
            return target
        self._client.failure = ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".part-", dir=folder.resolve()) as aside:
                file = self._finder.download(archive.link, aside, {"sha256": [sha256]})
                if archive.link.is_file:  # it is not downloaded, and stays
                    file = Path(shutil.copy(file, aside))
                file.replace(target)
        except HashMismatchError as error:
            reason = "what the package index sends is not what it lists"
            if archive.sha256 != sha256:
                reason = "it is not the archive that is wanted"
            raise unproven(archive.name, error.actual["sha256"], sha256, reason) from None
        except (UnpackError, httpx2.HTTPError) as error:
            raise OverlayError(
                Exit.ABSENT,
                f"could not be downloaded ({self._client.failure or error})",
                subject=archive.name,
                next_step="run it again, or name a wheel file and give SHA256=its checksum",
            ) from None
        except OSError as error:
            raise denied(error, "the release was not fetched") from None
        return target


def fetch_sdist(project: str, version: str, sha256: str, folder: Path) -> Path:
    """Download the source archive of a release into ``folder``, and prove it.

    Args:
        project: the distribution, as ``vllm``.
        version: of the release.
        sha256: the archive's checksum, in lower-case hexadecimal.
        folder: where the archive is kept; one that is there already is not downloaded again.

    Returns:
        The archive.

    Raises:
        OverlayError: the index lists none, cannot be asked, or has another one.
    """
    index = PackageIndex()
    for archive in index.archives([project], Version(version)):
        if not archive.link.is_wheel:
            return index.download(archive, sha256, folder)
    raise OverlayError(
        Exit.ABSENT,
        f"the package index lists no source archive of {project} {version}",
        next_step="see `pip config list` for the index, and name one that has it",
    )


def unproven(
    subject: Path | str, digest: str | None, expected: str | None, reason: str
) -> OverlayError:
    """The refusal for an archive whose checksum is not, or cannot be, confirmed."""
    return OverlayError(
        Exit.RELEASE,
        f"is not proven: {reason}",
        subject=subject,
        expected=expected and f"SHA-256 {expected}",
        found=f"SHA-256 {digest}" if digest else "no checksum",
        next_step="download it anew, or, if you know its checksum from somewhere, "
        "name the file and give SHA256=that",
    )


def _archive(link: Link) -> Archive:
    stated = (link.hash_option or {}).get("sha256")
    if stated:
        return Archive(link, stated[0].lower(), LOCAL if link.is_file else STATED)
    return Archive(link, digest_of(link.file_path) if link.is_file else None, LOCAL)


class _Client(PyPIClient):
    """An HTTP client that retries as pip does.

    Attributes:
        failure: why the last request that failed did so, or nothing.
    """

    def __init__(self, settings: Mapping[str, str], indexes: list[str]) -> None:
        options: dict[str, Any] = {}
        if authorities := settings.get("cert"):
            folder = authorities if Path(authorities).is_dir() else None
            file = None if folder else authorities
            options["verify"] = ssl.create_default_context(cafile=file, capath=folder)
        super().__init__(
            trusted_hosts=settings.get("trusted-host", "").split(),
            cert=settings.get("client-cert"),
            proxy=settings.get("proxy"),
            timeout=float(settings.get("timeout") or settings.get("default-timeout") or "15"),
            auth=MultiDomainBasicAuth(prompting=False, index_urls=indexes),
            follow_redirects=True,
            **options,
        )
        self._retries = int(settings.get("retries", DEFAULT_MAX_RETRIES))
        self.failure = ""

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:  # noqa: ANN401
        """Send a request; a connection that fails becomes a response with status 503."""
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(0.25 * 2**attempt)
            try:
                response = super().send(request, **options)
                failure = f"{response.status_code} {response.reason_phrase}"
            except httpx2.TransportError as error:
                response = httpx2.Response(503, request=request)
                failure = str(error) or type(error).__name__
            if not response.is_server_error:
                break
            response.close()
        if response.is_error and response.status_code not in _NOT_LISTED:
            self.failure = f"{request.url.host}: {failure}"
        return response


def _pip_settings() -> dict[str, str]:
    """The options of ``pip download``, by their long names, as files and variables set them."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        check=False,
        env=children_environment() | {"PIP_QUIET": "0", "PIP_VERBOSE": "0", "PIP_LOG": os.devnull},
    )
    if done.returncode:
        raise OverlayError(
            Exit.USAGE,
            f"pip's configuration cannot be read: {done.stderr.strip()}",
            next_step="mend what `pip config list` complains of",
        )
    lines = [line.partition("=") for line in done.stdout.splitlines()]
    settings: dict[str, str] = {}
    for section in ("global.", "download.", ":env:."):  # a later one overrides
        for name, _, value in lines:
            if name.startswith(section) and (text := ast.literal_eval(value)):
                settings[name.removeprefix(section)] = text
    return settings
