"""Read the probe's files.

A file is blocks, each of them one line of JSON, and then records of 64-bit integers. The processes
of one engine write a file each: FILE.rank0, FILE.rank1, FILE.engine0, ... Those of one host share
its clock; those of several hosts are aligned by the time of day.
"""

from __future__ import annotations

import json
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

FORMAT = "vllm-readiness-probe"
#: The newest version; all of these can be read.
VERSION = 2
_VERSIONS = (1, 2)
_BEGIN = b'{"format": "%b"' % FORMAT.encode()
#: The fields of a record that this program knows; a file may have more.
FIELDS = ("kind", "began", "ended", "step", "owner", "extra")
#: Other names that the first line must have.
_NAMES = (
    *("label", "pid", "boot", "thread", "lost", "vllm", "overlay", "digest", "device"),
    *("started_unix_ns", "started_ns", "written_ns"),
)


class ProbeError(Exception):
    """A file is missing or damaged; the sentence names it, and says what to do."""


class Span(NamedTuple):
    """One record.

    Attributes:
        kind: name of the recorded event, such as ``execute_model`` or ``fence``.
        began: nanoseconds of the host's monotonic clock.
        ended: the same.
        step: the worker's step, counted from 1.
        owner: the code that waited, of a fence; else empty.
        continuing: requests that the step continues, of ``execute_model`` and ``output``.
        thread: ident of the recording thread; 0 of a readback.
        consumed: when the host took a readback; else 0.
    """

    kind: str
    began: int
    ended: int
    step: int
    owner: str
    continuing: int
    thread: int
    consumed: int

    @property
    def length(self) -> int:
        """Nanoseconds from begin to end."""
        return self.ended - self.began


class Step(NamedTuple):
    """One step of a worker, from the beginning of ``execute_model`` to that of the next.

    Attributes:
        number: counted from 1.
        began: nanoseconds of the host's monotonic clock.
        ended: the same; the next step's beginning.
        parts: part of the step to nanoseconds of its thread; ``outside`` is the rest, which
            the probe does not see.
        continuing: requests that it continues; 0 if it only begins some.
        waits: part of the step, and who waited in it, to nanoseconds of its thread's fences.
    """

    number: int
    began: int
    ended: int
    parts: dict[str, int]
    continuing: int = 1
    waits: Mapping[tuple[str, str], int] = MappingProxyType({})

    @property
    def length(self) -> int:
        """Nanoseconds from begin to end."""
        return self.ended - self.began


#: The recorded parts of a step, in the order in which they are shown.
PARTS = ("schedule", "execute_model", "sample_tokens", "get_output", "update_from_output")
OUTSIDE = "outside"


@dataclass
class Process:
    """The records of one process.

    Attributes:
        path: its file.
        header: the line of the file's last block.
        spans: ordered by their end.
    """

    path: Path
    header: dict[str, Any]
    spans: list[Span] = field(repr=False)

    @property
    def label(self) -> str:
        """The process's name: ``rank0``, ``engine0``, ..."""
        return str(self.header["label"])

    def of(self, kind: str) -> list[Span]:
        """Return the records of one kind."""
        return [span for span in self.spans if span.kind == kind]

    def within(self, began: int, ended: int) -> Process:
        """Return the records that lie between two times, in nanoseconds."""
        kept = [span for span in self.spans if began <= span.began and span.ended <= ended]
        return Process(self.path, self.header, kept)

    def intervals(self) -> list[int]:
        """Return the nanoseconds between outputs, of steps that continued requests.

        A step that only begins requests comes after a pause.
        """
        return [span.length for span in self.of("output") if span.continuing]

    def waits(self) -> dict[str, int]:
        """Return the nanoseconds of fences in each part of a step, over all threads."""
        waits: Counter[str] = Counter()
        by_thread: dict[int, list[Span]] = {}
        for part in sorted((span for span in self.spans if span.kind in PARTS), key=_begin):
            by_thread.setdefault(part.thread, []).append(part)
        outer = {thread: _outermost(parts) for thread, parts in by_thread.items()}
        for fence in self.of("fence"):
            parts = outer.get(fence.thread, [])
            waits[_part_of(fence, parts)] += fence.length
        return dict(waits)

    def steps(self) -> list[Step]:
        """Return the steps with a known end: the next one follows, and continues requests."""
        launches = sorted(self.of("execute_model"), key=_begin)
        parts = sorted((span for span in self.spans if span.kind in PARTS), key=_begin)
        fences = sorted(self.of("fence"), key=_begin)
        steps = []
        for launch, following in pairwise(launches):
            if not following.continuing or following.step != launch.step + 1:
                continue
            began, ended = launch.began, following.began
            first, last = (bisect_left(parts, time, key=_begin) for time in (began, ended))
            lengths: Counter[str] = Counter()
            outer = _outermost(p for p in parts[first:last] if p.thread == launch.thread)
            for part in outer:
                lengths[part.kind] += part.length
            lengths[OUTSIDE] = ended - began - lengths.total()
            first, last = (bisect_left(fences, time, key=_begin) for time in (began, ended))
            waits: Counter[tuple[str, str]] = Counter()
            for fence in fences[first:last]:
                if fence.thread == launch.thread:
                    waits[_part_of(fence, outer), fence.owner] += fence.length
            steps.append(
                Step(launch.step, began, ended, dict(lengths), launch.continuing, dict(waits))
            )
        return steps


def _begin(span: Span) -> int:
    return span.began


def _part_of(fence: Span, parts: Sequence[Span]) -> str:
    """Return the part that a fence begins in; they are in order, and none is in another."""
    n = bisect_right(parts, fence.began, key=_begin) - 1
    return parts[n].kind if n >= 0 and fence.began < parts[n].ended else OUTSIDE


def _outermost(parts: Iterable[Span]) -> list[Span]:
    """Return the parts that lie in no other one; they are in order."""
    kept: list[Span] = []
    for part in parts:
        if not kept or part.began >= kept[-1].ended:
            kept.append(part)
    return kept


def read(path: Path) -> Process:
    """Read one file.

    Raises:
        ProbeError: it is missing, not a probe's, of another version, or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProbeError(
            f"{path}: {error.strerror}. Name the value of VLLM_READINESS_PROBE"
        ) from None
    return parse(path, data)


def parse(path: Path, data: bytes) -> Process:
    """Parse the contents of a file; errors as for :func:`read`."""
    header, spans = _block(path, data)
    rest = data[_length(header, data) :]
    while rest:
        line, end, _ = rest.partition(b"\n")
        if not (line.startswith(_BEGIN) or _BEGIN.startswith(line)):
            raise _damaged(path, "bytes that are no block")
        try:
            header, more = _block(path, rest) if end else (header, [])
        except ProbeError:
            end = b""
        if not end:
            break  # it is being written, or its process was killed then
        spans += more
        rest = rest[_length(header, rest) :]
    return Process(path, header, spans)


def _length(header: dict[str, Any], data: bytes) -> int:
    """Return the length of the block that the data begin with."""
    line = data.index(b"\n") + 1
    return line + int(header["records"]) * len(header["fields"]) * 8


def _damaged(path: Path, what: object) -> ProbeError:
    return ProbeError(f"{path} is damaged: {what}. Have it written again (kill -USR2 the process)")


def _block(path: Path, data: bytes) -> tuple[dict[str, Any], list[Span]]:
    """Return the line and the records of the block that the data begin with."""
    line, _, rest = data.partition(b"\n")
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ProbeError(
            f"{path} is not a file of the probe. Name the value of VLLM_READINESS_PROBE, or one "
            "process's file (FILE.rank0)"
        )
    try:
        return header, _spans(path, header, rest)
    except (LookupError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None


def _spans(path: Path, header: dict[str, Any], rest: bytes) -> list[Span]:
    """Return the records behind the first line.

    Raises:
        ProbeError: they are of another version, or cut off.
        LookupError, TypeError, ValueError: the first line lacks something, or is wrong.
    """
    if header["version"] not in _VERSIONS or tuple(header["fields"][: len(FIELDS)]) != FIELDS:
        raise ProbeError(
            f"{path} is of another version ({header['version']}); read it with the overlay "
            f"that wrote it ({header.get('overlay') or 'see its first line'})"
        )
    if lacking := [name for name in _NAMES if name not in header]:
        raise LookupError(f"its first line lacks {', '.join(lacking)}")
    width = len(header["fields"])
    size = header["records"] * width * 8
    if len(rest) < size:
        raise ProbeError(
            f"{path} is cut off: {len(rest):,} bytes of records, and should be {size:,}. Have it "
            "written again (kill -USR2 the process)"
        )
    numbers = array("q", rest[:size])
    if header["byteorder"] != sys.byteorder:
        numbers.byteswap()
    spans = []
    for start in range(0, len(numbers), width):
        kind, began, ended, step, owner, extra = numbers[start : start + len(FIELDS)]
        name = header["kinds"][kind]
        spans.append(
            Span(
                *(name, began, ended, step),
                owner=header["owners"][owner] if name == "fence" else "",
                continuing=owner if name in ("execute_model", "output") else 0,
                thread=0 if name == "readback" else extra,
                consumed=extra if name == "readback" else 0,
            )
        )
    return spans


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile by linear interpolation, as numpy does; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
