"""Claims by which an engine keeps other engines from replacing its probe files.

The engine's first process with the probe generates an engine id, and stores it in an environment
variable that the other processes inherit. Each recording process holds a shared lock on
``FILE.lock``, which contains the id, until the process exits. Another engine may claim the path
once no process holds the lock.
"""

# mirrors: nothing

import fcntl
import os
import secrets
from contextlib import suppress

from vllm.v1.readiness.engine import switch

#: Attempts to read an id that another process of the engine is writing.
_TRIES = 50
#: File descriptors of held locks, by path; never closed.
_held: dict[str, int] = {}


def engine_id() -> str:
    """Return this engine's id; the first call generates it."""
    return os.environ.setdefault(switch.PROBE_ENGINE, secrets.token_hex(8))


def claim(path: str) -> bool:
    """Claim a path until this process exits; False if another engine records to the path."""
    if path in _held:
        return True
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return True
    try:
        claimed = _lock(lock)
    except OSError:
        claimed = True  # locks are not supported
    if claimed:
        _held[path] = lock
    else:
        os.close(lock)
    return claimed


def _lock(lock: int) -> bool:
    """Lock an open file if it is free or contains this engine's id; return whether locked.

    Raises:
        OSError: the file system does not support locks.
    """
    own = engine_id().encode()
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails unless free
            os.ftruncate(lock, 0)
            os.pwrite(lock, own, 0)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.pread(lock, 64, 0) == own:
                return True
            fcntl.flock(lock, fcntl.LOCK_UN)
            return False
    return False
