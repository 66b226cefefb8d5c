"""Figures of each case, from the driver's stamps and the probe's records."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from probe.records import OUTSIDE, Process, Span, Step, percentile

from bench.compare.summary import CaseResult, Figures, differences
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.rows import Row
from bench.engines.slices import Active

#: Steps at the end of a case that have a figure of their own.
LAST = 32
#: The largest relative difference between the probe's times and the client's.
TOLERANCE = 0.02
#: The largest share of waiting in ``get_output`` where outputs are consumed at once.
CONTROL = 0.1
_TIMED = ("execute_model", "sample_tokens", "get_output")
#: Between which the wait for the device moves; together they tell whether it is less.
_TOGETHER = _TIMED[1:]


def results(row: Row, driven: Mapping[str, Any], probe: Sequence[Process]) -> dict[str, CaseResult]:
    """Return the result of each case of a row.

    Args:
        row: the row.
        driven: case to the JSON of :mod:`bench.engines.driver`.
        probe: the records of the engine's processes.
    """
    workers = [process for process in probe if "rank" in process.label]
    read = {
        name: _result(row, name, case, workers[0].within(*case["window"]) if workers else None)
        for name, case in driven.items()
    }
    for worker in workers[1:]:
        for name, result in read.items():
            result.figures |= _of_rank(worker.within(*driven[name]["window"]))
    for name, result in read.items():
        if (quiet := driven[name]["quiet"]) is not None:
            result.problems = [
                *result.problems,
                *(
                    f"{kind} without copies and with them differ: {where}"
                    for kind, where in differences(CaseResult({}, quiet), result)
                ),
            ]
    return read


def _result(row: Row, name: str, case: Mapping[str, Any], seen: Process | None) -> CaseResult:
    """Return the figures of a case, and what the probe's records show to be wrong."""
    active = Active(case["pauses"])
    began, ended = map(active.at, case["window"])
    stamps = [active.at(stamp) for stamp in case["stamps"]]
    intervals = [after - before for before, after in pairwise(stamps)]
    whole = [
        length
        for length, (before, after) in zip(intervals, pairwise(case["stamps"]), strict=True)
        if not active.crossed(before, after)
    ]
    figures: Figures = {
        "tokens/s": case["counts"]["tokens"][0] / (ended - began) * 1e9,
        "ITL p50": percentile_ms(whole, 50),
        "ITL p99": percentile_ms(whole, 99),
        "ITL max": percentile_ms(whole, 100),
        f"ITL p50 of the last {LAST}": percentile_ms(whole[-LAST:], 50),
    }
    if seen is not None and case["pauses"]:
        seen = replace(seen, spans=[_on(active, span) for span in seen.spans])
    problems = [*case["problems"]]
    fences: dict[str, int] = {}
    if seen is None:
        problems.append("the probe left no records")
    else:
        # A step that only begins requests computes prompts.
        steps = [step for step in seen.steps() if step.continuing]
        problems += _check(row, seen, steps, intervals)
        parts, waits = _parts(seen, steps)
        figures |= parts
        fences = dict(Counter(span.owner for span in seen.of("fence")))
        if row.cases[name].consumed and waits.get("get_output", 0) > sum(waits.values()) * CONTROL:
            problems.append("outputs were not consumed at once: get_output still waits")
    if (copies := case["copies"]) is not None:
        figures |= {"copies": float(len(copies)), "copy, shortest": min(copies, default=None)}
        if min(copies, default=0.0) < ForeignCopies.LEAST * 1e3:
            problems.append(f"a copy took {min(copies, default=0.0):.0f} ms")
    packed = {kind: case[kind] for kind in ("tokens", "logprobs")}
    speeds = active.speeds(case["stamps"]) if case["pauses"] else []
    return CaseResult(
        figures,
        packed,
        case["counts"],
        problems,
        fences,
        speeds,
        case["disturbance"],
        case["prompts"],
        [case["window"][1] - case["window"][0], case["longest"]],
    )


def _on(active: Active, span: Span) -> Span:
    """Return a record with the times of a clock that stands still in pauses."""
    consumed = active.at(span.consumed) if span.consumed else 0
    return span._replace(
        began=active.at(span.began), ended=active.at(span.ended), consumed=consumed
    )


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
    for part in _TOGETHER:
        figures[f"waiting in {part}, ms a step"] = waits.get(part, 0) / count / 1e6
    together = sum(waits.get(part, 0) for part in _TOGETHER)
    figures["waiting in both, ms a step"] = together / count / 1e6
    both: dict[int, int] = {}
    for span in (span for kind in _TOGETHER for span in only.of(kind)):
        both[span.step] = both.get(span.step, 0) + span.length
    figures["sample_tokens + get_output p50"] = percentile_ms([*both.values()], 50)
    copies = [span.length for span in only.of("readback")]
    figures["readback p50"] = percentile_ms(copies, 50)
    figures["readback p99"] = percentile_ms(copies, 99)
    return figures, waits


def _of_rank(seen: Process) -> Figures:
    """Return the figures of a rank beside the first: the same code, and waits of its own."""
    steps = [step for step in seen.steps() if step.continuing]
    parts, _ = _parts(seen, steps)
    names = ("execute_model p50", "sample_tokens p50", "waiting in both, ms a step")
    return {f"{seen.label}: {name}": parts[name] for name in names}


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


def percentile_ms(nanoseconds: Sequence[int], percent: float) -> float | None:
    """Return a percentile in milliseconds; None of nothing."""
    value = percentile(nanoseconds, percent)
    return None if value is None else value / 1e6
