"""Upstream's tests, out of the release's source archive."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import NAME, Pin

PROJECT = "vllm"
#: What is unpacked. Upstream's package is not: it would be imported in an installation's place.
MEMBERS = ("tests", "pyproject.toml")


def obtain(pin: Pin, folder: Path) -> Path:
    """Fetch the pinned release's source archive, prove it, and unpack its tests.

    Args:
        pin: names the release, and the archive's checksum.
        folder: keeps the archive and the tests; what is there is not fetched or unpacked again.

    Returns:
        A directory with ``tests/`` and ``pyproject.toml``.

    Raises:
        OverlayError: the archive is not pinned, cannot be had, or is another one.
    """
    # Hosts without an index are given the tests, and have no libraries to ask one with.
    from review.index import fetch_sdist

    name = f"{PROJECT}-{pin.release}.tar.gz"
    if name not in pin.archives:
        raise OverlayError(
            Exit.RELEASE,
            f"does not list {name}, so it cannot be proven",
            subject=NAME,
            next_step="add its SHA-256 under [archives], or unpack it and name it with --tests",
        )
    archive = fetch_sdist(PROJECT, pin.release, pin.archives[name], folder)
    root = folder / f"{PROJECT}-{pin.release}"
    if not root.exists():
        with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as part:
            _unpack(archive, Path(part), f"{root.name}/")
            # Of several runs at a time, the first one's directory stays.
            with contextlib.suppress(OSError):
                (Path(part) / root.name).rename(root)
    return given(root)


def _unpack(archive: Path, folder: Path, prefix: str) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            if member.name.removeprefix(prefix).split("/")[0] in MEMBERS:
                opened.extract(member, folder, filter="data")


def given(folder: Path) -> Path:
    """Check an unpacked source archive.

    Raises:
        OverlayError: it lacks the tests or their configuration.
    """
    if lacking := [name for name in MEMBERS if not (folder / name).exists()]:
        raise OverlayError(
            Exit.USAGE,
            f"has no {' and no '.join(lacking)}",
            subject=folder,
            next_step="name the directory that the source archive was unpacked to",
        )
    return folder.resolve()
