"""Ring buffer of a process's newest records, six 64-bit integers each."""

# mirrors: nothing

import threading
from struct import Struct

import numpy as np

#: Fields of a record. ``began`` and ``ended`` are values of ``time.perf_counter_ns``. ``step``
#: counts the worker's steps from 1. ``owner`` is the index of a fence's owner, or the number of
#: cached requests in an ``execute_model`` or ``output``. ``extra`` is the thread's ident, or the
#: time at which the host saw a readback complete.
FIELDS = ("kind", "began", "ended", "step", "owner", "extra")
#: Kinds of records; ``kind`` is an index. An ``output`` lasts from the previous output to this one.
#: A ``readback`` lasts from the earliest start of the copy until the host may read the result.
KINDS = (
    "execute_model",
    "sample_tokens",
    "get_output",
    "fence",
    "readback",
    "output",
    "schedule",
    "update_from_output",
)
EXECUTE, SAMPLE, GET_OUTPUT, FENCE, READBACK, OUTPUT, SCHEDULE, UPDATE = range(len(KINDS))

FORMAT = "vllm-readiness-probe"
VERSION = 2

_RECORD = Struct(f"={len(FIELDS)}q")
_SIZE = _RECORD.size
_pack = _RECORD.pack_into
#: Maximum records copied under the lock.
_CHUNK = 4096


class Ring:
    """The newest ``capacity`` records of one process, ``size`` bytes each. Thread-safe.

    ``capacity`` is a power of two. ``count`` includes overwritten records.
    """

    size = _SIZE

    # 100 MB: four minutes at a thousand steps per second, with eight records per step.
    def __init__(self, capacity: int = 1 << 21) -> None:
        assert capacity & (capacity - 1) == 0
        self.capacity = capacity
        self.count = 0
        self._mask = capacity - 1
        self._memory = memoryview(bytearray(capacity * _SIZE))
        self._lock = threading.Lock()

    def put(
        self, kind: int, began: int, ended: int, step: int, owner: int = 0, extra: int = 0
    ) -> None:
        """Add one record; see :data:`FIELDS`."""
        with self._lock:
            offset = (self.count & self._mask) * _SIZE
            self.count += 1
            _pack(self._memory, offset, kind, began, ended, step, owner, extra)

    def since(self, cursor: int) -> tuple[np.ndarray, int]:
        """Return the records after ``cursor``, int64 [records, fields], and the next cursor.

        The first call passes 0. Overwritten records are missing.
        """
        parts, end = self.parts(cursor)
        records = np.frombuffer(b"".join(parts), np.int64).reshape(-1, len(FIELDS))
        return records, end

    def parts(self, cursor: int) -> tuple[list[bytes], int]:
        """Return the records of :meth:`since` as bytes, in parts of at most ``_CHUNK`` records."""
        parts: list[bytes] = []
        with self._lock:
            end = self.count
        while cursor < end:
            with self._lock:
                cursor = max(cursor, self.count - self.capacity)
                start = cursor & self._mask
                stop = min(start + min(end - cursor, _CHUNK), self.capacity)
                if cursor < end:
                    parts.append(bytes(self._memory[start * _SIZE : stop * _SIZE]))
                    cursor += stop - start
        return parts, max(cursor, end)
