"""The probe's files, read.

A file is one line of JSON, and records of 64-bit integers behind it. One engine's
processes write files of their own: FILE.rank0, FILE.rank1, FILE.engine0, ... Those of one
host have its clock in common; those of several are brought together by the time of day.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "vllm-readiness-probe"
VERSION = 1
#: The fields of a record, as this program knows them; a file may have more.
FIELDS = ("kind", "began", "ended", "step", "owner", "extra")
#: What else the first line says.
_SAID = ("label", "pid", "boot", "thread", "lost", "vllm", "overlay", "digest", "device")
_TIMES = ("started_unix_ns", "started_ns", "written_ns")
#: How the file of a process is named behind what VLLM_READINESS_PROBE held.
_LABEL = re.compile(r"(?:dp\d+-)?(?:rank|engine)\d+")


class ProbeError(Exception):
    """A file is not what it should be; the sentence names it, and says what to do."""


class Span(NamedTuple):
    """One record.

    Attributes:
        kind: what was recorded, by name.
        began: in nanoseconds of the host's monotonic clock.
        ended: the same.
        step: the worker's, counted from 1.
        owner: of a fence, who waited; else empty.
        continuing: of ``execute_model`` and ``output``, the requests that the step continues.
        thread: whose it was; of a readback, 0.
        consumed: of a readback, when the host took it; else 0.
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
        """In nanoseconds."""
        return self.ended - self.began


class Step(NamedTuple):
    """One step of a worker, from the beginning of ``execute_model`` to that of the next.

    Attributes:
        number: counted from 1.
        began: in nanoseconds.
        ended: the same; when the next step began.
        parts: name to nanoseconds, of what the step's thread did; ``outside`` is the rest,
            in which it did nothing that the probe knows.
        waiting: part to the nanoseconds of it that were fences.
        fences: owner to number.
        continuing: requests that it continues; 0: it only begins some.
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
        """In nanoseconds."""
        return self.ended - self.began


#: What a step's thread may be doing, in the order in which it is shown.
PARTS = ("schedule", "execute_model", "sample_tokens", "get_output", "update_from_output")
OUTSIDE = "outside"


@dataclass
class Process:
    """What one process recorded.

    Attributes:
        path: its file.
        header: the file's first line.
        spans: in the order in which they ended.
    """

    path: Path
    header: dict[str, Any]
    spans: list[Span] = field(repr=False)

    @property
    def label(self) -> str:
        """Which process: ``rank0``, ``engine0``, ..."""
        return str(self.header["label"])

    def of(self, kind: str) -> list[Span]:
        """The records of one kind."""
        return [span for span in self.spans if span.kind == kind]

    def within(self, began: int, ended: int) -> Process:
        """What began at ``began`` or later, and ended by ``ended``."""
        kept = [span for span in self.spans if began <= span.began and span.ended <= ended]
        return Process(self.path, self.header, kept)

    def intervals(self) -> list[int]:
        """Nanoseconds between an output and the one before, where the step continued requests.

        A step that begins requests alone comes after a pause, and its interval is not theirs.
        """
        return [span.length for span in self.of("output") if span.continuing]

    def waits(self) -> dict[str, int]:
        """Nanoseconds of fences by the part that they are in, whichever thread it is of."""
        waits: dict[str, int] = {}
        for thread in {span.thread for span in self.spans if span.kind == "fence"}:
            mine = [span for span in self.spans if span.thread == thread]
            parts = sorted((s for s in mine if s.kind in PARTS), key=lambda span: span.began)
            outer = _outermost(parts)
            begun = [part.began for part in outer]
            for wait in mine:
                if wait.kind == "fence":
                    at = bisect_right(begun, wait.began) - 1
                    inside = at >= 0 and wait.began < outer[at].ended
                    where = outer[at].kind if inside else OUTSIDE
                    waits[where] = waits.get(where, 0) + wait.length
        return waits

    def steps(self) -> list[Step]:
        """The steps whose end is known: the next one follows, and continues requests."""
        begun = sorted(self.of("execute_model"), key=lambda span: span.began)
        others = sorted(
            (span for span in self.spans if span.kind in PARTS), key=lambda span: span.began
        )
        fences = sorted(self.of("fence"), key=lambda span: span.began)
        steps = []
        part = fence = 0
        for one, following in pairwise(begun):
            while part < len(others) and others[part].began < one.began:
                part += 1
            while fence < len(fences) and fences[fence].began < one.began:
                fence += 1
            mine = []
            while part < len(others) and others[part].began < following.began:
                if others[part].thread == one.thread:
                    mine.append(others[part])
                part += 1
            waits = []
            while fence < len(fences) and fences[fence].began < following.began:
                waits.append(fences[fence])
                fence += 1
            if following.continuing and following.step == one.step + 1:
                steps.append(_step(one, following.began, mine, waits))
        return steps


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
            where = next((p.kind for p in outer if p.began <= wait.began < p.ended), OUTSIDE)
            waiting[where] = waiting.get(where, 0) + wait.length
    lengths[OUTSIDE] = ended - one.began - sum(lengths.values())
    return Step(one.step, one.began, ended, lengths, waiting, counts, one.continuing)


def _outermost(parts: Iterable[Span]) -> list[Span]:
    """The spans of one thread, in order, without those that lie within another."""
    kept: list[Span] = []
    for part in parts:
        if not kept or part.began >= kept[-1].ended:
            kept.append(part)
    return kept


def read(path: Path) -> Process:
    """Read one file.

    Raises:
        ProbeError: it is not there, is not a probe's, is of another version, or damaged.
    """
    try:
        with path.open("rb") as file:
            line, rest = file.readline(), file.read()
    except OSError as error:
        raise ProbeError(f"{path}: {error.strerror}. Name what VLLM_READINESS_PROBE held") from None
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ProbeError(
            f"{path} is not a file of the probe. Name what VLLM_READINESS_PROBE held, or one "
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
    """The records behind the first line.

    Raises:
        ProbeError: they are of another version, or cut off.
        LookupError, TypeError, ValueError: the first line is not what it should be.
    """
    if header["version"] != VERSION or tuple(header["fields"][: len(FIELDS)]) != FIELDS:
        raise ProbeError(
            f"{path} is of another version ({header['version']}); read it with the overlay "
            f"that wrote it ({header.get('overlay') or 'see its first line'})"
        )
    if lacking := [name for name in (*_SAID, *_TIMES) if name not in header]:
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
    """The processes of one engine, and what was left out.

    Args:
        name: what VLLM_READINESS_PROBE held, or one process's file.

    Returns:
        The processes by label; and a sentence on each file that is of an earlier engine.

    Raises:
        ProbeError: there is no such file, or one is not what it should be.
    """
    if not name.name:
        raise ProbeError(
            "no file is named. Name what VLLM_READINESS_PROBE held: python3 scripts/probe FILE, "
            "or make probe FILE=FILE"
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
    found = [read(file) for file in files]
    newest = max(_began(process) for process in found)
    kept = [process for process in found if _ended(process) > newest]
    old = [f"{each.path} is of an earlier engine" for each in found if each not in kept]
    if several_hosts(kept):
        kept = [_by_time_of_day(process) for process in kept]
    return sorted(kept, key=_rank), old


def several_hosts(processes: Iterable[Process]) -> bool:
    """Whether their clocks are those of more than one host."""
    return len({process.header["boot"] for process in processes}) > 1


def _by_time_of_day(process: Process) -> Process:
    """The same with times since 1970, by its host's clock."""
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
    """In nanoseconds of Unix time."""
    return int(process.header["started_unix_ns"])


def _ended(process: Process) -> int:
    header = process.header
    return _began(process) + int(header["written_ns"]) - int(header["started_ns"])


def _rank(process: Process) -> tuple[str, int]:
    """Ranks by number, and not as text."""
    digits = "".join(filter(str.isdigit, process.label.rpartition("k")[2]))
    return process.label.rstrip("0123456789"), int(digits or 0)


def percentile(values: Iterable[float], percent: float) -> float | None:
    """By linear interpolation, as numpy's default; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
