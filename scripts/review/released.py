"""Which releases of vLLM there are, and which of them a person means."""

from __future__ import annotations

from functools import cache

from overlay.errors import Exit, OverlayError
from packaging.version import Version

from review.index import PackageIndex
from review.wheels import PROJECTS, version_asked

#: Stands for the newest final release.
LATEST = "latest"

_RANGE = ".."
_EXAMPLE = (
    "write RELEASES=0.23.0..latest or RELEASES=0.22.1,0.23.0; name a wheel file as RELEASE, alone"
)


def final() -> list[Version]:
    """The final releases that the package index lists, oldest first.

    Releases before and after a final one (rc, dev, post) are none of them, and neither is a
    release that was withdrawn.

    Raises:
        OverlayError: the index cannot be asked, or lists none.
    """
    index = PackageIndex()
    # If one distribution cannot be asked for, what the other has might not be the newest.
    versions = {version for project in PROJECTS for version in index.versions(project)}
    if listed := sorted(version for version in versions if _is_final(version)):
        return listed
    raise OverlayError(
        Exit.ABSENT,
        f"the package index lists no final release of {' or '.join(PROJECTS)}",
        next_step="see `pip config list` for the index, and name one that has it; or name a wheel "
        "file and give SHA256=its checksum",
    )


def one(wanted: str) -> str:
    """The version or wheel file that a person means by ``RELEASE``.

    Raises:
        OverlayError: it is ``latest``, and :func:`final` fails.
    """
    return str(final()[-1]) if wanted == LATEST else wanted


def several(wanted: str) -> list[str]:
    """The versions that a person means by ``RELEASES``, oldest first.

    Args:
        wanted: versions and ranges with commas between them. A range, as ``0.23.0..latest``, has
            every final release from its first to its last; a version by itself may be any.

    Raises:
        OverlayError: that is no list of versions, a range is empty, or :func:`final` fails.
    """
    known = cache(final)

    def version(text: str) -> Version:
        return known()[-1] if text == LATEST else version_asked(text, _EXAMPLE)

    meant: set[Version] = set()
    for part in wanted.split(","):
        first, dots, last = (each.strip() for each in part.partition(_RANGE))
        if not dots:
            meant.add(version(first))
            continue
        begin, end = version(first), version(last)
        within = [each for each in known() if begin <= each <= end]
        if not within:
            raise OverlayError(
                Exit.USAGE if begin > end else Exit.ABSENT,
                "ends before it begins" if begin > end else "holds no final release",
                subject=part.strip(),
                found=f"the newest that the package index lists is {known()[-1]}",
                next_step=_EXAMPLE,
            )
        meant.update(within)
    return [str(each) for each in sorted(meant)]


def _is_final(version: Version) -> bool:
    return not (version.is_prerelease or version.is_postrelease or version.local)
