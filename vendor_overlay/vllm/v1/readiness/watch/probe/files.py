"""A process's file of records: a sequence of blocks, one per write.

A block is one line of JSON, followed by the raw records, oldest first. The first write replaces the
file, and later writes append new records. A file that would exceed the size of :data:`_ROOM` rings
is replaced by the current content of the ring.
"""

# mirrors: nothing

import json
import os
import sys
from collections.abc import Callable, Mapping

from vllm.v1.readiness.watch.probe.ring import FIELDS, FORMAT, KINDS, VERSION, Ring

_ROOM = 2


class RecordFile:
    """File of a ring's records, in an existing directory. Not thread-safe."""

    def __init__(self, ring: Ring, path: str) -> None:
        self.ring = ring
        self.path = path
        self._cursor = 0
        self._records = 0
        # Device, inode and size after the last write.
        self._state: tuple[int, int, int] | None = None

    def write(self, header: Callable[[], Mapping[str, object]]) -> None:
        """Append the new records, or replace the file.

        ``header`` returns further fields of the JSON. Called after the records are copied.

        Raises:
            OSError: the file cannot be written; its content is unchanged.
        """
        expected = self._records + self.ring.count - self._cursor
        known = self._state is not None and self._state == _state(self.path)
        append = known and expected <= _ROOM * self.ring.capacity
        parts, cursor = self.ring.parts(self._cursor if append else 0)
        added = sum(map(len, parts)) // self.ring.size
        total = self._records * append + added
        line = {
            "format": FORMAT,
            "version": VERSION,
            "fields": FIELDS,
            "kinds": KINDS,
            "byteorder": sys.byteorder,
            "records": added,
            "lost": cursor - total,
            **header(),
        }
        put = _append if append else _replace
        put(self.path, json.dumps(line).encode() + b"\n", parts)
        self._cursor, self._records, self._state = cursor, total, _state(self.path)


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size


def _append(path: str, line: bytes, parts: list[bytes]) -> None:
    with open(path, "ab") as file:
        size = file.tell()
        try:
            file.write(line)
            for part in parts:  # joining them would hold the GIL
                file.write(part)
            file.flush()
        except OSError:
            os.truncate(path, size)
            raise


def _replace(path: str, line: bytes, parts: list[bytes]) -> None:
    """Replace the file atomically; readers of the old file are unaffected."""
    staged = f"{path}.{os.getpid()}.tmp"
    try:
        with open(staged, "wb") as file:
            file.write(line)
            for part in parts:
                file.write(part)
        os.replace(staged, path)
    except OSError:
        if os.path.exists(staged):
            os.unlink(staged)
        raise
