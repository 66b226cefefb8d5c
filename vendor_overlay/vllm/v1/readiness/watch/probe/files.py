"""The file that a process's records are written to: blocks, one for each time it is written.

A block is one line of JSON, followed by the records as they are in memory, oldest first. The
first block begins a new file; later ones are appended, and hold what came since. So a write costs
what is new, and not the whole ring. A file that would hold more than :data:`_ROOM` rings is begun
anew with the newest.
"""

# mirrors: nothing

import json
import os
import sys
from collections.abc import Callable, Mapping

from vllm.v1.readiness.watch.probe.ring import FIELDS, FORMAT, KINDS, VERSION, Ring

_ROOM = 2


class RecordFile:
    """One file. For one thread at a time.

    Args:
        ring: the records.
        path: in an existing directory.
    """

    def __init__(self, ring: Ring, path: str) -> None:
        self.ring = ring
        self.path = path
        self._cursor = 0
        self._records = 0
        # Device, inode and size of what was written; None: nothing yet.
        self._state: tuple[int, int, int] | None = None

    def write(self, header: Callable[[], Mapping[str, object]]) -> None:
        """Write the records that are not in the file yet, or all.

        Args:
            header: returns what the line of JSON holds beside the format, the fields and the
                kinds; called after the records have been copied, so that it knows every
                owner that they refer to.

        Raises:
            OSError: the file cannot be written; what it held is unchanged.
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
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size


def _append(path: str, line: bytes, parts: list[bytes]) -> None:
    with open(path, "ab") as file:
        size = file.tell()
        try:
            file.write(line)
            for part in parts:  # joining them would hold the GIL for long
                file.write(part)
            file.flush()
        except OSError:
            os.truncate(path, size)
            raise


def _replace(path: str, line: bytes, parts: list[bytes]) -> None:
    """Replace the file as a whole: a reader of the earlier one reads on in that."""
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
