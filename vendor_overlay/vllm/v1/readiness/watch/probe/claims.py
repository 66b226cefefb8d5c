"""Which engine a path belongs to: two engines on one path would replace each other's files.

The first process of an engine that has the probe gives the engine an id, in a variable that the
others inherit. Each process that records holds a shared lock on ``FILE.lock``, in which the
engine's id is; the lock goes with the process. Another engine takes the path over when nobody
holds it.
"""

# mirrors: nothing

import fcntl
import os
import secrets
from contextlib import suppress

from vllm.v1.readiness.engine import switch

#: Tries to see another process of the same engine write the id.
_TRIES = 50
#: The locks that this process holds, by path; they are never closed.
_held: dict[str, int] = {}


def engine_id() -> str:
    """The id of the engine that this process is of; the first call of an engine makes it."""
    return os.environ.setdefault(switch.PROBE_ENGINE, secrets.token_hex(8))


def claim(path: str) -> bool:
    """Claim a path for this engine, until this process ends.

    Args:
        path: the value of ``VLLM_READINESS_PROBE``.

    Returns:
        Whether it is this engine's, as far as that can be known: some file systems have no
        locks. False if a process of another engine is recording to it.
    """
    if path in _held:
        return True
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return True
    try:
        claimed = _lock(lock)
    except OSError:
        claimed = True
    if claimed:
        _held[path] = lock
    else:
        os.close(lock)
    return claimed


def _lock(lock: int) -> bool:
    """Lock an open file that has this engine's id, or that nobody holds.

    Raises:
        OSError: the file system has no locks.
    """
    own = engine_id().encode()
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody records to it
            os.ftruncate(lock, 0)
            os.pwrite(lock, own, 0)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(lock, 64, 0) == own:
                return True
            fcntl.flock(lock, fcntl.LOCK_UN)
            return False
    return False
