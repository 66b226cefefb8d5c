"""The upstream names that the overlay uses, inferred once for all workers of a test run."""

import fcntl
import os
import pickle
from functools import cache

import pytest
from overlay.installation import locate
from review import review
from review.uses import Use
from series.upstream import Upstream, from_installation
from support.sites import OVERLAY, UPSTREAM


@cache
def _base() -> Upstream:
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@pytest.fixture(scope="session")
def base() -> Upstream:
    """Upstream's files of the pinned release."""
    return _base()


@pytest.fixture(scope="session")
def overlay_uses(tmp_path_factory: pytest.TempPathFactory) -> list[Use]:
    """The uses of this overlay; the first worker that asks infers them, which takes minutes."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers of this run
    file = folder / "overlay-uses"
    with (folder / "overlay-uses.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            base = _base()
            overlaid = {
                path: OVERLAY.overlaid_bytes(path, base.read(path)) for path in OVERLAY.targets
            }
            file.write_bytes(pickle.dumps(review.uses_of(OVERLAY, base, overlaid)))
        uses: list[Use] = pickle.loads(file.read_bytes())
    return uses
