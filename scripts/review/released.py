"""Which release of vLLM a person means."""

from __future__ import annotations

from overlay.errors import Exit, OverlayError
from packaging.version import Version

from review.index import PackageIndex
from review.wheels import PROJECTS

#: Stands for the newest final release.
LATEST = "latest"


def latest() -> Version:
    """Return the newest final release that the package index lists.

    Releases before and after a final one (rc, dev, post) are none, and neither is a release that
    was withdrawn.

    Raises:
        OverlayError: the index cannot be asked, or lists none.
    """
    index = PackageIndex()
    # If one distribution cannot be asked for, what the other has might not be the newest.
    versions = {version for project in PROJECTS for version in index.versions(project)}
    if listed := [version for version in versions if _is_final(version)]:
        return max(listed)
    raise OverlayError(
        Exit.ABSENT,
        f"the package index lists no final release of {' or '.join(PROJECTS)}",
        next_step="see `pip config list` for the index, and name one that has it; or name a wheel "
        "file and give SHA256=its checksum",
    )


def one(wanted: str) -> str:
    """The version or wheel file that a person means by ``RELEASE``.

    Raises:
        OverlayError: it is ``latest``, and :func:`latest` fails.
    """
    return str(latest()) if wanted == LATEST else wanted


def _is_final(version: Version) -> bool:
    return not (version.is_prerelease or version.is_postrelease or version.local)
