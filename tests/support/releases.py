"""Real releases of vLLM, each downloaded once into build/wheels/releases."""

import fcntl
from functools import cache

from review import wheels
from review.wheels import Release

from support.sites import OVERLAY, REPO

FOLDER = REPO / "build" / "wheels" / "releases"


@cache
def release(version: str) -> Release:
    """A release, proven; of several processes that ask at once, one downloads it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f".{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return wheels.obtain(version, None, FOLDER, OVERLAY.pin)
