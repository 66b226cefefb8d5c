"""Read the probe's files.

A file is one line of JSON, and then records of 64-bit integers. The processes of one engine
write a file each: FILE.rank0, FILE.rank1, FILE.engine0, ... Those of one host share its clock;
those of several hosts are aligned by the time of day.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "vllm-readiness-probe"
VERSION = 1
#: The fields of a record that this program knows; a file may have more.
FIELDS = ("kind", "began", "ended", "step", "owner", "extra")
#: Other names that the first line must have.
_NAMES = ("label", "pid", "boot", "thread", "lost", "vllm", "overlay", "digest", "device")
_TIMES = ("started_unix_ns", "started_ns", "written_ns")
#: The ending of a process's file, behind the value of VLLM_READINESS_PROBE.
_LABEL = re.compile(r"(?:dp\d+-)?(?:rank|engine)\d+")


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
        waiting: part to its nanoseconds in fences.
        fences: owner to number of fences.
        continuing: requests that it continues; 0 if it only begins some.
    """

    number: int
    began: int
    ended: int
    parts: dict[str, int]
    waiting: dict[str, int]
    fences: dict[str, int]
    continuing: int = 1

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
        header: the file's first line.
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
        waits: dict[str, int] = {}
        for thread in {span.thread for span in self.spans if span.kind == "fence"}:
            mine = [span for span in self.spans if span.thread == thread]
            outer = _outermost(sorted((s for s in mine if s.kind in PARTS), key=_begin))
            for wait in mine:
                if wait.kind == "fence":
                    where = _part_of(wait, outer)
                    waits[where] = waits.get(where, 0) + wait.length
        return waits

    def steps(self) -> list[Step]:
        """Return the steps with a known end: the next one follows, and continues requests."""
        begun = sorted(self.of("execute_model"), key=_begin)
        parts = sorted((span for span in self.spans if span.kind in PARTS), key=_begin)
        fences = sorted(self.of("fence"), key=_begin)
        steps = []
        for one, following in pairwise(begun):
            if following.continuing and following.step == one.step + 1:
                times = one.began, following.began
                mine = [part for part in _begun(parts, *times) if part.thread == one.thread]
                steps.append(_step(one, following.began, mine, _begun(fences, *times)))
        return steps


def _begin(span: Span) -> int:
    return span.began


def _begun(spans: Sequence[Span], first: int, last: int) -> Sequence[Span]:
    """Return those of ordered spans that began at ``first`` or later, and before ``last``."""
    return spans[bisect_left(spans, first, key=_begin) : bisect_left(spans, last, key=_begin)]


def _step(one: Span, ended: int, parts: Sequence[Span], fences: Sequence[Span]) -> Step:
    lengths: dict[str, int] = {}
    waiting: dict[str, int] = {}
    counts: dict[str, int] = {}
    outer = _outermost(parts)
    for part in outer:
        lengths[part.kind] = lengths.get(part.kind, 0) + part.length
    for wait in fences:
        counts[wait.owner] = counts.get(wait.owner, 0) + 1
        if wait.thread == one.thread:
            where = _part_of(wait, outer)
            waiting[where] = waiting.get(where, 0) + wait.length
    lengths[OUTSIDE] = ended - one.began - sum(lengths.values())
    return Step(one.step, one.began, ended, lengths, waiting, counts, one.continuing)


def _part_of(wait: Span, parts: Sequence[Span]) -> str:
    """Return the kind of the part in which a fence began; the parts are ordered."""
    n = bisect_right(parts, wait.began, key=_begin) - 1
    return parts[n].kind if n >= 0 and wait.began < parts[n].ended else OUTSIDE


def _outermost(parts: Iterable[Span]) -> list[Span]:
    """Return the spans of one thread that do not lie within another; they are in order."""
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
        with path.open("rb") as file:
            line, rest = file.readline(), file.read()
    except OSError as error:
        raise ProbeError(
            f"{path}: {error.strerror}. Name the value of VLLM_READINESS_PROBE"
        ) from None
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
        return Process(path, header, _spans(path, header, rest))
    except (LookupError, TypeError, ValueError) as error:
        raise ProbeError(
            f"{path} is damaged: {type(error).__name__}: {error}. Have it written again "
            "(kill -USR2 the process)"
        ) from None


def _spans(path: Path, header: dict[str, Any], rest: bytes) -> list[Span]:
    """Return the records behind the first line.

    Raises:
        ProbeError: they are of another version, or cut off.
        LookupError: the first line lacks something, or names a kind that is not there.
        TypeError: a value of the first line is of another type.
        ValueError: a value of the first line is impossible.
    """
    if header["version"] != VERSION or tuple(header["fields"][: len(FIELDS)]) != FIELDS:
        raise ProbeError(
            f"{path} is of another version ({header['version']}); read it with the overlay "
            f"that wrote it ({header.get('overlay') or 'see its first line'})"
        )
    if lacking := [name for name in (*_NAMES, *_TIMES) if name not in header]:
        raise LookupError(f"its first line lacks {', '.join(lacking)}")
    width = len(header["fields"])
    if len(rest) != header["records"] * width * 8:
        raise ProbeError(
            f"{path} is cut off: {len(rest):,} bytes of records, and should be "
            f"{header['records'] * width * 8:,}. Have it written again (kill -USR2 the process)"
        )
    numbers = array("q")
    numbers.frombytes(rest)
    if header["byteorder"] != sys.byteorder:
        numbers.byteswap()
    kinds, owners = header["kinds"], header["owners"]
    spans = []
    for at in range(0, len(numbers), width):
        kind, began, ended, step, owner, extra = numbers[at : at + len(FIELDS)]
        name = kinds[kind]
        spans.append(
            Span(
                *(name, began, ended, step),
                owner=owners[owner] if name == "fence" else "",
                continuing=owner if name in ("execute_model", "output") else 0,
                thread=0 if name == "readback" else extra,
                consumed=extra if name == "readback" else 0,
            )
        )
    return spans


def engine(name: Path) -> tuple[list[Process], list[str]]:
    """Read the files of one engine.

    Args:
        name: the value of VLLM_READINESS_PROBE, or one process's file.

    Returns:
        The processes by label, and a sentence about each file of an earlier engine.

    Raises:
        ProbeError: there is no such file, or one is damaged.
    """
    if not name.name:
        raise ProbeError(
            "no file is named. Name the value of VLLM_READINESS_PROBE: make probe FILE=FILE"
        )
    if name.is_file():
        return [read(name)], []
    files = sorted(
        file
        for file in name.parent.glob(f"{escape(name.name)}.*")
        if _LABEL.fullmatch(file.name.removeprefix(f"{name.name}.")) and file.is_file()
    )
    if not files:
        raise ProbeError(
            f"no file {name}.*: the engine writes them when it ends, or when a process of it "
            f"gets SIGUSR2; was VLLM_READINESS_PROBE={name} set, and did it make a step?"
        )
    processes = [read(file) for file in files]
    newest = max(_began(process) for process in processes)
    kept = [process for process in processes if _ended(process) > newest]
    old = [f"{p.path} is of an earlier engine" for p in processes if p not in kept]
    if several_hosts(kept):
        kept = [_by_time_of_day(process) for process in kept]
    return sorted(kept, key=_rank), old


def several_hosts(processes: Iterable[Process]) -> bool:
    """Return whether the processes ran on more than one host."""
    return len({process.header["boot"] for process in processes}) > 1


def _by_time_of_day(process: Process) -> Process:
    """Return the process with times in nanoseconds of Unix time, by its host's clock."""
    since = _began(process) - int(process.header["started_ns"])
    spans = [
        span._replace(
            began=span.began + since,
            ended=span.ended + since,
            consumed=span.consumed and span.consumed + since,
        )
        for span in process.spans
    ]
    return Process(process.path, process.header, spans)


def _began(process: Process) -> int:
    """Return the start of the records in nanoseconds of Unix time."""
    return int(process.header["started_unix_ns"])


def _ended(process: Process) -> int:
    header = process.header
    return _began(process) + int(header["written_ns"]) - int(header["started_ns"])


def _rank(process: Process) -> tuple[str, int]:
    """Return a key that sorts ranks by number."""
    digits = "".join(filter(str.isdigit, process.label.rpartition("k")[2]))
    return process.label.rstrip("0123456789"), int(digits or 0)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Return a percentile by linear interpolation, as numpy does; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
