"""The probe's memory: a ring of records, and the file that it is written to.

A record is six 64-bit integers; writing one takes a lock and a ``struct.pack_into``, and
leaves nothing for the garbage collector. The file is one line of JSON and the records
after it, as they lie in memory, oldest first.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from struct import Struct

import numpy as np

#: What a record holds. ``began`` and ``ended`` are nanoseconds of ``time.perf_counter_ns``.
#:
#: ``step`` counts the worker's steps from 1. ``owner`` indexes the names for a fence; of
#: ``execute_model`` and ``output`` it is the number of requests that the step continues.
#: ``extra`` is the thread's ident; of a readback it is when it was consumed.
FIELDS = ("kind", "began", "ended", "step", "owner", "extra")
#: What is recorded; a record's ``kind`` is the index in here.
#:
#: ``output`` lasts from the output before to this one. ``readback`` lasts from the moment
#: when the device could start the copy until the host may read.
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
VERSION = 1

_RECORD = Struct(f"={len(FIELDS)}q")
_SIZE = _RECORD.size
_pack = _RECORD.pack_into
#: Records copied at a time, so that nobody waits long for the lock.
_CHUNK = 4096


class Ring:
    """The newest records of one process. Thread-safe.

    Args:
        capacity: records, a power of two; the oldest give way to the newest.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
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
            at = self.count
            self.count = at + 1
            place = (at & self._mask) * _SIZE
            _pack(self._memory, place, kind, began, ended, step, owner, extra)

    def since(self, cursor: int) -> tuple[np.ndarray, int]:
        """The records that came after ``cursor``, as far as they are still there.

        Returns:
            int64 [records, fields], and the cursor for the next call; 0 is the first.
        """
        parts, following = self._parts(cursor)
        records = np.frombuffer(b"".join(parts), np.int64).reshape(-1, len(FIELDS))
        return records, following

    def _parts(self, cursor: int) -> tuple[list[bytes], int]:
        """The same as :meth:`since`, in parts of at most ``_CHUNK`` records."""
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

    def write(self, path: str, header: Callable[[], Mapping[str, object]]) -> None:
        """Write all there is to ``path``, which is replaced as a whole.

        Args:
            path: its directory exists.
            header: gives what the first line says besides the format, the fields and the
                kinds; called when the records have been taken, so that it can name whatever
                they refer to.

        Raises:
            OSError: it cannot be written; what was there before is still there.
        """
        parts, count = self._parts(0)
        records = sum(map(len, parts)) // _SIZE
        line = {
            "format": FORMAT,
            "version": VERSION,
            "fields": FIELDS,
            "kinds": KINDS,
            "byteorder": sys.byteorder,
            "records": records,
            "lost": count - records,
            **header(),
        }
        staged = f"{path}.{os.getpid()}.tmp"
        try:
            with open(staged, "wb") as file:
                file.write(json.dumps(line).encode() + b"\n")
                for part in parts:  # joining them, all threads would stand still
                    file.write(part)
            os.replace(staged, path)
        except OSError:
            if os.path.exists(staged):
                os.unlink(staged)
            raise
