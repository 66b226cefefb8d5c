"""Files of the probe with known records, and strategies that draw records."""

import json
import logging.handlers
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hypothesis import strategies as st
from probe.records import FIELDS, FORMAT, VERSION, Process, parse

KINDS = [
    *("execute_model", "sample_tokens", "get_output", "fence"),
    *("readback", "output", "schedule", "update_from_output"),
]
OWNERS = ["history", "output", "thinking-budget"]
MAIN, OTHER = 140_158_253_539_008, 140_158_240_000_000

Row = tuple[int, int, int, int, int, int]


def header(count: int, **changes: Any) -> dict[str, Any]:
    """Return a file's first line."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fields": list(FIELDS),
        "kinds": KINDS,
        "byteorder": sys.byteorder,
        "records": count,
        "lost": 0,
        "label": "rank0",
        "pid": 7,
        "boot": "this host's",
        "engine": "an engine",
        "workers": [],
        "thread": MAIN,
        "owners": OWNERS,
        "vllm": "0.22.0",
        "overlay": None,
        "digest": None,
        "features": [],
        "torch": "2.11.0",
        "device": "CPU",
        "command": ["serve"],
        "started_unix_ns": 10**18,
        "started_ns": 0,
        "written_ns": 10**12,
        **changes,
    }


def content(rows: Iterable[Row], swapped: bool = False, **changes: Any) -> bytes:
    """Return a file's bytes, with ``swapped`` in the other byte order."""
    numbers = array("q", [number for row in rows for number in row])
    if swapped:
        numbers.byteswap()
        order = {"little": "big", "big": "little"}[sys.byteorder]
        changes = {"byteorder": order, **changes}
    line = json.dumps(header(len(numbers) // len(FIELDS), **changes)).encode()
    return line + b"\n" + numbers.tobytes()


def written(path: Path, rows: Iterable[Row], **options: Any) -> Path:
    """Write a file with :func:`content`."""
    path.write_bytes(content(rows, **options))
    return path


def process(rows: Iterable[Row], **options: Any) -> Process:
    """Return the process that a file of these records is read as."""
    return parse(Path("rank0"), content(rows, **options))


def row(kind: str, began: int, ended: int, step: int = 1, owner: int = 0, extra: int = MAIN) -> Row:
    """Return a record as it is written."""
    return KINDS.index(kind), began, ended, step, owner, extra


class Part(NamedTuple):
    """A part of a step.

    Attributes:
        kind: name of the event.
        gap: nanoseconds since the part before.
        head: nanoseconds before its fence.
        tail: nanoseconds after it.
        wait: the fence's length and owner, if there is one.
    """

    kind: str
    gap: int
    head: int
    tail: int
    wait: tuple[int, int] | None

    @property
    def length(self) -> int:
        """Nanoseconds, with the fence."""
        return self.head + self.tail + (self.wait[0] if self.wait else 0)


class DrawnStep(NamedTuple):
    """A step of a worker.

    Attributes:
        continuing: requests that it continues.
        parts: those of the main thread, ``execute_model`` first.
        gap: nanoseconds after the last part.
        late: four times in nanoseconds, or None if there is no asynchronous output: from the end
            of ``sample_tokens`` until the copy begins (it may be negative), of the copy, from
            ``sample_tokens`` until another thread may ask for the output, and of its
            ``get_output`` at least.
    """

    continuing: int
    parts: tuple[Part, ...]
    gap: int
    late: tuple[int, int, int, int] | None


_times = st.integers(0, 5_000_000)
_waits = st.none() | st.tuples(st.integers(1, 5_000_000), st.integers(0, len(OWNERS) - 1))


def _part(kind: str) -> st.SearchStrategy[Part]:
    return st.builds(Part, st.just(kind), _times, _times, _times, _waits)


#: The steps of a worker.
STEPS = st.lists(
    st.builds(
        DrawnStep,
        st.integers(0, 3),
        st.tuples(_part("execute_model"), _part("sample_tokens")).flatmap(
            lambda first: st.lists(
                st.sampled_from(["get_output", "update_from_output", "schedule"]).flatmap(_part),
                max_size=3,
            ).map(lambda more: (*first, *more))
        ),
        _times,
        st.none() | st.tuples(st.integers(-3_000_000, 3_000_000), _times, _times, _times),
    ),
    max_size=5,
)


def rows_of(steps: Iterable[DrawnStep], began: int = 10**15) -> list[Row]:
    """Return the records of steps that follow one another, ordered by their end."""
    rows: list[Row] = []
    now = began
    last_output = 0
    free = began  # from when the other thread is idle
    for number, step in enumerate(steps, 1):
        for part in step.parts:
            # A step begins with its first part; a gap before is the step's before.
            start = now = now if part is step.parts[0] else now + part.gap
            now += part.head
            if part.wait is not None:
                length, owner = part.wait
                rows.append(row("fence", now, now + length, number, owner))
                now += length
            now += part.tail
            count = step.continuing if part.kind == "execute_model" else 0
            rows.append(row(part.kind, start, now, number, count))
        sampled = max(r[2] for r in rows if KINDS[r[0]] == "sample_tokens")
        if step.late is not None:
            begins, copied, later, took = step.late
            start, ready = sampled + begins, sampled + max(begins, 0) + copied
            asked = max(free, sampled + later)
            seen = max(ready, asked + took)
            rows.append(row("readback", start, ready, number, 0, seen))
            rows.append(row("get_output", asked, seen, number, 0, OTHER))
            if last_output:
                rows.append(row("output", last_output, seen, number, step.continuing, OTHER))
            last_output = free = seen
        now += step.gap
    return sorted(rows, key=lambda record: record[2])


@contextmanager
def logged(module: ModuleType) -> Iterator[Callable[[], list[str]]]:
    """Yield a function that returns a module's warnings and errors so far."""
    handler = logging.handlers.BufferingHandler(1000)
    logger = logging.getLogger(module.__name__)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    yield lambda: [record.getMessage() for record in handler.buffer]
    logger.removeHandler(handler)
    logger.setLevel(level)
