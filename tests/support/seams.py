"""What the real patches call, and the words of our real modules."""

from functools import cache

from overlay.installation import locate
from review.vocabulary import Vocabulary
from review.words import Seams
from series.upstream import Upstream, from_installation

from support.sites import OVERLAY, REPO, UPSTREAM


@cache
def base() -> Upstream:
    """Upstream's files of the pinned release."""
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@cache
def vocabulary() -> Vocabulary:
    """The features and fixes of our modules."""
    return Vocabulary(REPO / "vendor_overlay")


@cache
def overlaid() -> dict[str, bytes]:
    """The patched files by path."""
    return {path: OVERLAY.overlaid_bytes(path, base().read(path)) for path in OVERLAY.targets}


@cache
def seams() -> Seams:
    """What each patch calls."""
    return Seams(OVERLAY.series, base())
