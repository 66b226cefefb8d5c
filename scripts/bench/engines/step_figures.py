"""Figures of one case of one child, from its stamps and its probe's records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from probe.records import OUTSIDE, Process, Step, percentile

from bench.compare import outputs
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.rows import Row

#: Steps at the end of a case that have a figure of their own.
LAST = 32
#: The fewest steps beside a foreign copy that make a figure.
FEWEST = 8
#: The largest relative difference between the probe's times and the client's.
TOLERANCE = 0.02
#: The largest share of waiting in ``get_output`` where outputs are consumed at once.
CONTROL = 0.1
_STREAMS = ("tokens", "logprobs")
_TIMED = ("execute_model", "sample_tokens", "get_output")

#: Figure to its value, None if it was not seen. Times are in milliseconds.
Figures = dict[str, float | None]


@dataclass
class Child:
    """One engine that was measured on one side.

    Attributes:
        side: its side.
        round: counted from 1.
        result: the JSON of :mod:`bench.engines.driver`.
        probe: the records of its processes.
    """

    side: str
    round: int
    result: Mapping[str, Any]
    probe: Sequence[Process]

    @property
    def name(self) -> str:
        """Side and round."""
        return f"{self.side} round {self.round}"

    def case(self, row: Row, name: str) -> Mapping[str, Any]:
        """Return the driver's JSON of a case."""
        case: Mapping[str, Any] = self.result["rows"][row.name][name]
        return case

    def worker(self, row: Row, name: str) -> Process | None:
        """Return the first worker's records of a case; None if there are none."""
        began, ended = self.case(row, name)["window"]
        ranks = [process for process in self.probe if "rank" in process.label]
        return ranks[0].within(began, ended) if ranks else None


def case_figures(row: Row, name: str, child: Child) -> tuple[Figures, list[str]]:
    """Return the figures of a case, and what the probe's records show to be wrong."""
    case = child.case(row, name)
    stamps: Sequence[int] = case["stamps"]
    began, ended = case["window"]
    intervals = [after - before for before, after in pairwise(stamps)]
    figures: Figures = {
        "tokens/s": case["counts"]["tokens"][0] / (ended - began) * 1e9,
        "ITL p50": percentile_ms(intervals, 50),
        "ITL p99": percentile_ms(intervals, 99),
        f"ITL p50 of the last {LAST}": percentile_ms(intervals[-LAST:], 50),
    }
    seen = child.worker(row, name)
    if seen is None:
        return figures, ["the probe left no records"]
    # A step that only begins requests computes prompts.
    steps = [step for step in seen.steps() if step.continuing]
    problems = _check(row, seen, steps, intervals)
    parts, waits = _parts(seen, steps)
    figures |= parts
    if row.cases[name].consumed and waits.get("get_output", 0) > sum(waits.values()) * CONTROL:
        problems.append("outputs were not consumed at once: get_output still waits")
    if case["beside"] is not None:
        marks = [time for time, beside in case["beside"] if beside]
        figures |= beside_figures(steps, marks, case["copies"])
        problems += beside_problems(steps, marks, case["copies"])
        quiet = row.without_copies(name)
        problems += [
            f"{kind} of {quiet!r} and {name!r} differ: {where}"
            for kind, where in differences(child.case(row, quiet), case)
        ]
    return figures, problems


def _parts(seen: Process, steps: Sequence[Step]) -> tuple[Figures, dict[str, int]]:
    """Return the figures of decoding steps, and the nanoseconds of their waits by part."""
    decoding = {step.number for step in steps}
    only = Process(seen.path, seen.header, [span for span in seen.spans if span.step in decoding])
    figures: Figures = {"step p50": percentile_ms([step.length for step in steps], 50)}
    for kind in _TIMED:
        lengths = [span.length for span in only.of(kind)]
        figures[f"{kind} p50"] = percentile_ms(lengths, 50)
        figures[f"{kind} p99"] = percentile_ms(lengths, 99)
    figures["outside p50"] = percentile_ms([step.parts[OUTSIDE] for step in steps], 50)
    fences = [span.length for span in only.of("fence")]
    count, waits = max(len(steps), 1), only.waits()
    figures["fences, a step"] = len(fences) / count
    figures["fence p50"] = percentile_ms(fences, 50)
    figures["fences, ms a step"] = sum(fences) / count / 1e6
    for part in ("sample_tokens", "get_output"):
        figures[f"waiting in {part}, ms a step"] = waits.get(part, 0) / count / 1e6
    copies = [span.length for span in only.of("readback")]
    figures["readback p50"] = percentile_ms(copies, 50)
    figures["readback p99"] = percentile_ms(copies, 99)
    return figures, waits


def _check(row: Row, seen: Process, steps: Sequence[Step], intervals: Sequence[int]) -> list[str]:
    """Check that the probe saw every step once, and all of the client's time."""
    problems = []
    if (count := len(seen.of("sample_tokens"))) != row.output:
        problems.append(f"the probe saw {count} of {row.output} steps")
    if seen.header["lost"]:
        problems.append(f"the probe's ring lost {seen.header['lost']} records")
    if not steps or not intervals:
        return problems
    for kind in _TIMED:
        counts = Counter(span.step for span in seen.of(kind))
        if counts and any(counts[step.number] != 1 for step in steps):
            problems.append(f"the probe has {kind} not once a step")
    # The first output to the last, on two clocks. A step begins when an output has been handed
    # out, the one before last under asynchronous scheduling. So there are two outputs fewer from
    # the third step's beginning to the last one's, at the same moments of a step. Where these
    # differ, one at either end may be the longest.
    whole, median = sum(intervals), statistics.median(intervals)
    between_outputs, between_steps = sum(seen.intervals()), sum(step.length for step in steps[1:])
    for name, total, slack in (
        ("outputs", between_outputs, median / 2),
        ("steps", between_steps + 2 * median, max(intervals)),
    ):
        if abs(total - whole) > TOLERANCE * whole + slack:
            times = f"{total / 1e6:.1f} ms, the client's {whole / 1e6:.1f} ms"
            problems.append(f"the probe's {name} make up {times}")
    return problems


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and place of each difference between the outputs of two children.

    Args:
        one: the driver's JSON of a case: digests, and packed streams.
        other: that of the other child.
    """
    for kind in _STREAMS:
        if one["sha256"][kind] != other["sha256"][kind]:
            streams = outputs.unpack(one[kind]), outputs.unpack(other[kind])
            yield kind, outputs.first_difference(*streams) or "only by their digests"


def beside_figures(
    steps: Sequence[Step], marks: Iterable[int], lengths: Sequence[float]
) -> Figures:
    """Compare steps begun beside a foreign copy with the quiet ones of the same case.

    Args:
        steps: in order.
        marks: when a step began beside a copy, in nanoseconds.
        lengths: of each foreign copy, in milliseconds.
    """
    beside = _marked(steps, marks)
    figures: Figures = {
        "steps begun beside the copy": float(len(beside)),
        "copies": float(len(lengths)),
        "copy, shortest": min(lengths, default=None),
    }
    measures: dict[str, Callable[[Step], int]] = {
        # The parts that can wait for a copy.
        "wait of a step": lambda step: sum(
            step.parts.get(part, 0) for part in ("sample_tokens", "get_output")
        ),
        "step": lambda step: step.length,
    }
    for name, measure in measures.items():
        quiet = [measure(step) for step in steps if step.number not in beside]
        copying = [measure(step) for step in steps if step.number in beside]
        for percent, label in ((50, "p50"), (99, "p99"), (100, "max")):
            one, other = percentile_ms(quiet, percent), percentile_ms(copying, percent)
            figures[f"{name}, quiet, {label}"] = one
            figures[f"{name}, beside the copy, {label}"] = other
            figures[f"{name}, beside / quiet, {label}"] = ratio(other, one)
    return figures


def beside_problems(
    steps: Sequence[Step], marks: Iterable[int], lengths: Sequence[float]
) -> list[str]:
    """Return why these steps do not show the effect of a long copy."""
    problems = []
    beside = len(_marked(steps, marks))
    if beside < FEWEST or len(steps) - beside < FEWEST:
        problems.append(f"{beside} of {len(steps)} steps began beside a copy")
    if (shortest := min(lengths, default=0.0)) < ForeignCopies.LEAST * 1e3:
        problems.append(f"a copy took {shortest:.0f} ms")
    return problems


def _marked(steps: Sequence[Step], marks: Iterable[int]) -> set[int]:
    """Return the numbers of the steps in which a mark lies."""
    ordered = sorted(marks)
    marked: set[int] = set()
    n = 0
    for step in steps:
        while n < len(ordered) and ordered[n] < step.began:
            n += 1
        if n < len(ordered) and ordered[n] < step.ended:
            marked.add(step.number)
    return marked


def percentile_ms(nanoseconds: Sequence[int], percent: float) -> float | None:
    """Return a percentile in milliseconds; None of nothing."""
    value = percentile(nanoseconds, percent)
    return None if value is None else value / 1e6


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one / other; None if either was not seen, or the other is 0."""
    return one / other if one is not None and other else None
