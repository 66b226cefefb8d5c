"""The pinned release, and the names of it that the overlay uses."""

import pytest
from overlay.installation import locate
from review.uses import Use
from series.upstream import Upstream, from_installation
from support import names
from support.sites import OVERLAY, UPSTREAM


@pytest.fixture(scope="session")
def base() -> Upstream:
    """Upstream's files of the pinned release."""
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@pytest.fixture(scope="session")
def overlay_uses(base: Upstream) -> list[Use]:
    """The uses of this overlay."""
    return names.overlay_uses(base)
