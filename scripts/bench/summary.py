"""From what the children gave and the probe saw to one run, and to no ratio that misleads."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bench import outputs
from bench.readback import Foreign
from bench.rows import BASELINE, Row
from probe.records import OUTSIDE, Process, Span, Step, percentile

#: The side that the others are held against.
FIRST = "stock"
LAST = 32
#: Of steps begun beside a foreign copy, so many at least make a figure.
FEWEST = 8
#: How far the probe's sum and the client's clock may be apart.
TOLERANCE = 0.02
#: Of all waiting, what may be left in ``get_output`` if outputs are consumed at once.
CONTROL = 0.1
#: Points of a plot.
POINTS = 48
_KINDS = ("tokens", "logprobs")
_TIMED = ("execute_model", "sample_tokens", "get_output")
#: What the cost of a case is said in, against the row's baseline on the same side.
_COSTS = ("tokens/s", "ITL p50", f"ITL p50 of the last {LAST}")


@dataclass
class Child:
    """One engine that was measured on one side.

    Attributes:
        side: which.
        round: counted from 1.
        found: what the child wrote.
        probe: what the probe recorded of its processes.
    """

    side: str
    round: int
    found: Mapping[str, Any]
    probe: Sequence[Process]

    @property
    def name(self) -> str:
        """How it is spoken of."""
        return f"{self.side} round {self.round}"


def row(
    row: Row, sides: Sequence[str], children: Sequence[Child], model: str | None = None
) -> dict[str, Any]:
    """What was found of one row.

    Args:
        row: which.
        sides: those that were to be measured.
        children: those of its engine, as far as they came to an end. Problems are looked for
            in all of them; figures are those of the rounds that every side has, but for a
            side that has none.
        model: the name of a model with weights; None: the generated one.
    """
    engine = row.engine
    rounds = {side: {c.round for c in children if c.side == side} for side in sides}
    # A median over rounds that the other side has not would not be compared with its like.
    common = set.intersection(*filter(None, rounds.values())) if children else set()
    compared = [child for child in children if child.round in common]
    asynchronous = {child.found["async scheduling"] for child in children}
    return {
        "title": row.title,
        "source": row.source,
        "model": model or dict(engine.model),
        **{key: getattr(engine, key) for key in ("batch", "prompt", "runner")},
        "output": row.output,
        "scheduling": "/".join(sorted("async" if on else "sync" for on in asynchronous)),
        "rounds": len(common),
        "compared": sorted(common),
        "sides": list(sides),
        "cases": _cases(row, sides, children, compared),
    }


#: What :func:`figures` gave for each child, by its id.
_Seen = Mapping[int, tuple[dict[str, float | None], list[str]]]


def _cases(
    row: Row, sides: Sequence[str], children: Sequence[Child], compared: Sequence[Child]
) -> dict[str, Any]:
    """Every case of a row; each child's figures of a case are made once."""
    seen: dict[str, _Seen] = {
        name: {id(child): figures(row, name, child) for child in children} for name in row.cases
    }
    problems = {name: _problems(row, name, sides, children, seen[name]) for name in row.cases}
    if children and not compared:
        for said in problems.values():
            said[FIRST].append("no round was measured on every side")
    for name in row.cases:
        for child in children:
            values, (base, _) = seen[name][id(child)][0], seen[BASELINE][id(child)]
            _refuse_ratios(values, bool(problems[name][child.side]))
            if name != BASELINE:
                refused = problems[name][child.side] or problems[BASELINE][child.side]
                for figure in _COSTS:
                    cost = None if refused else _ratio(values.get(figure), base.get(figure))
                    values[f"{figure} / {BASELINE}"] = cost
    return {
        name: _case(row, name, sides, compared, seen[name], problems[name]) for name in row.cases
    }


def _case(
    row: Row,
    name: str,
    sides: Sequence[str],
    children: Sequence[Child],
    seen: _Seen,
    problems: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    found = {id(child): child.found["rows"][row.name][name] for child in children}
    made = {}
    for figure in dict.fromkeys(key for child in children for key in seen[id(child)][0]):
        rounds = {
            side: [seen[id(c)][0].get(figure) for c in children if c.side == side] for side in sides
        }
        medians = {side: _median(values) for side, values in rounds.items()}
        ratios = {
            side: None
            if problems[side] or problems[FIRST]
            else _ratio(medians[side], medians[FIRST])
            for side in sides
            if side != FIRST and not _alone(figure)
        }
        made[figure] = {**medians, "rounds": rounds, "ratios": ratios}
    first = {side: next((c for c in children if c.side == side), None) for side in sides}
    return {
        "parameters": asdict(row.cases[name]),
        "figures": made,
        "fences": {
            side: [_fences(row, name, c) for c in children if c.side == side] for side in sides
        },
        "counts": {
            side: [found[id(c)]["counts"] for c in children if c.side == side] for side in sides
        },
        "problems": problems,
        "series": {side: _series(row, name, c) for side, c in first.items() if c},
        "timeline": {side: _timeline(row, name, c) for side, c in first.items() if c},
    }


def _alone(figure: str) -> bool:
    """Whether a figure is not held against stock's.

    Of stock's waits only those for events are seen as fences, of ours all; and what is a
    ratio already, or counts what the benchmark did, says nothing as a ratio.
    """
    words = ("fence", "waiting in", "steps begun", "copies", "copy,")
    return figure.startswith(words) or " / " in figure


def _refuse_ratios(values: dict[str, float | None], spoilt: bool) -> None:
    """Take away what is a ratio in itself, if nothing may be said of the case."""
    for figure in values if spoilt else ():
        if " / " in figure:
            values[figure] = None


def _problems(
    row: Row, name: str, sides: Sequence[str], children: Sequence[Child], seen: _Seen
) -> dict[str, list[str]]:
    """Why nothing may be said of a side: lost outputs, other outputs, or none at all.

    What several rounds have alike is said once.
    """
    problems: dict[str, list[str]] = {}
    first = next((child for child in children if child.side == FIRST), None)
    for side in sides:
        ours = [child for child in children if child.side == side]
        rounds: dict[tuple[str, str], list[int]] = {}
        for child in ours:
            case = child.found["rows"][row.name][name]
            held = first or ours[0]
            for text in (*case["problems"], *seen[id(child)][1]):
                rounds.setdefault(("", text), []).append(child.round)
            for kind, where in differences(held.found["rows"][row.name][name], case):
                rounds.setdefault((f"{kind} of {held.name} and ", where), []).append(child.round)
        problems[side] = [] if ours else [f"{side} was not measured"]
        for (before, text), numbers in rounds.items():
            name_ = f"{side} round{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            problems[side].append(f"{before}{name_}{' differ' if before else ''}: {text}")
    return problems


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of what, and where, the outputs of one child part from those of another.

    Args:
        one: what it gave in a case: digests, and the streams packed.
        other: what the other one gave.
    """
    for kind in _KINDS:
        if one["sha256"][kind] != other["sha256"][kind]:
            streams = outputs.unpack(one[kind]), outputs.unpack(other[kind])
            yield kind, outputs.first_difference(*streams) or "only by their digests"


def worker(row: Row, name: str, child: Child) -> Process | None:
    """The first worker's records of one case."""
    began, ended = child.found["rows"][row.name][name]["window"]
    ranks = [process for process in child.probe if "rank" in process.label]
    return ranks[0].within(began, ended) if ranks else None


def figures(row: Row, name: str, child: Child) -> tuple[dict[str, float | None], list[str]]:
    """The figures of a case, times in milliseconds, and what the probe finds wrong.

    A figure is None if it was not seen.
    """
    case = child.found["rows"][row.name][name]
    stamps: Sequence[int] = case["stamps"]
    began, ended = case["window"]
    between = [after - before for before, after in pairwise(stamps)]
    made: dict[str, float | None] = {
        "tokens/s": case["counts"]["tokens"][0] / (ended - began) * 1e9,
        "ITL p50": _ms(percentile(between, 50)),
        "ITL p99": _ms(percentile(between, 99)),
        f"ITL p50 of the last {LAST}": _ms(percentile(between[-LAST:], 50)),
    }
    seen = worker(row, name, child)
    if seen is None:
        return made, ["the probe left no records"]
    # Steps that only begin requests are the prompts'.
    steps = [step for step in seen.steps() if step.continuing]
    decoding = {step.number for step in steps}
    problems = _checked(row, seen, steps, between)
    made["step p50"] = _ms(percentile([step.length for step in steps], 50))
    for kind in _TIMED:
        lengths = [span.length for span in seen.of(kind) if span.step in decoding]
        made[f"{kind} p50"] = _ms(percentile(lengths, 50))
        made[f"{kind} p99"] = _ms(percentile(lengths, 99))
    made["outside p50"] = _ms(percentile([step.parts[OUTSIDE] for step in steps], 50))
    fences = [span for span in seen.of("fence") if span.step in decoding]
    only = Process(seen.path, seen.header, [s for s in seen.spans if s.step in decoding])
    waits = only.waits()
    count = max(len(steps), 1)
    made["fences, a step"] = len(fences) / count
    made["fence p50"] = _ms(percentile([span.length for span in fences], 50))
    made["fences, ms a step"] = sum(span.length for span in fences) / count / 1e6
    for part in ("sample_tokens", "get_output"):
        made[f"waiting in {part}, ms a step"] = waits.get(part, 0) / count / 1e6
    if row.cases[name].consumed and waits.get("get_output", 0) > sum(waits.values()) * CONTROL:
        problems.append("outputs were not consumed at once: get_output still waits")
    copies = [span.length for span in seen.of("readback") if span.step in decoding]
    made["readback p50"] = _ms(percentile(copies, 50))
    made["readback p99"] = _ms(percentile(copies, 99))
    if case["beside"] is not None:
        marks = [at for at, noisy in case["beside"] if noisy]
        made |= beside(steps, marks, case["copies"])
        problems += unlike(steps, marks, case["copies"])
        alone = child.found["rows"][row.name][row.alone(name)]
        problems += [
            f"{kind} of {row.alone(name)!r} and {name!r} differ: {where}"
            for kind, where in differences(alone, case)
        ]
    return made, problems


def _checked(row: Row, seen: Process, steps: Sequence[Step], between: Sequence[int]) -> list[str]:
    """Whether the probe saw what the client saw: every step once, and all of their time."""
    problems = []
    if (count := len(seen.of("sample_tokens"))) != row.output:
        problems.append(f"the probe saw {count} of {row.output} steps")
    if seen.header["lost"]:
        problems.append(f"the probe's ring lost {seen.header['lost']} records")
    if not steps or not between:
        return problems
    for kind in _TIMED:
        counts = Counter(span.step for span in seen.of(kind))
        if counts and any(counts[step.number] != 1 for step in steps):
            problems.append(f"the probe has {kind} not once a step")
    # From the first output to the last, on two clocks. Steps begin when an output has been
    # handed out, under asynchronous scheduling the one before last; so from the third step's
    # beginning to the last one's there are two outputs fewer, at the same moments of a step.
    # Where these differ, one at either end may be the longest.
    whole, median = sum(between), statistics.median(between)
    outputs_, lengths = sum(seen.intervals()), sum(step.length for step in steps[1:])
    for name, sum_, slack in (
        ("outputs", outputs_, median / 2),
        ("steps", lengths + 2 * median, max(between)),
    ):
        if abs(sum_ - whole) > TOLERANCE * whole + slack:
            problems.append(
                f"the probe's {name} make up {sum_ / 1e6:.1f} ms, the client's {whole / 1e6:.1f} ms"
            )
    return problems


def beside(
    steps: Sequence[Step], marks: Iterable[int], lengths: Sequence[float]
) -> dict[str, float | None]:
    """Steps begun while a foreign copy was running, against the quiet ones of the same run.

    Args:
        steps: in their order.
        marks: when a step began beside a copy, in nanoseconds.
        lengths: of each foreign copy, in milliseconds.
    """
    noisy = _marked(steps, marks)
    made: dict[str, float | None] = {
        "steps begun beside the copy": float(len(noisy)),
        "copies": float(len(lengths)),
        "copy, shortest": min(lengths, default=None),
    }
    measures: dict[str, Callable[[Step], int]] = {
        # All that can wait for a copy.
        "wait of a step": lambda step: sum(
            step.parts.get(part, 0) for part in ("sample_tokens", "get_output")
        ),
        "step": lambda step: step.length,
    }
    for name, measure in measures.items():
        quiet_ones = [measure(step) for step in steps if step.number not in noisy]
        noisy_ones = [measure(step) for step in steps if step.number in noisy]
        for percent in (50, 99, 100):
            one, other = _ms(percentile(quiet_ones, percent)), _ms(percentile(noisy_ones, percent))
            label = "max" if percent == 100 else f"p{percent}"
            made[f"{name}, quiet, {label}"] = one
            made[f"{name}, beside the copy, {label}"] = other
            made[f"{name}, beside / quiet, {label}"] = _ratio(other, one)
    return made


def unlike(steps: Sequence[Step], marks: Iterable[int], lengths: Sequence[float]) -> list[str]:
    """Why these steps do not show what a long copy does."""
    problems = []
    noisy = len(_marked(steps, marks))
    if noisy < FEWEST or len(steps) - noisy < FEWEST:
        problems.append(f"{noisy} of {len(steps)} steps began beside a copy")
    if (shortest := min(lengths, default=0.0)) < Foreign.LEAST * 1e3:
        problems.append(f"a copy took {shortest:.0f} ms")
    return problems


def _marked(steps: Sequence[Step], marks: Iterable[int]) -> set[int]:
    """The numbers of the steps that a mark lies in."""
    ordered = sorted(marks)
    found: set[int] = set()
    at = 0
    for step in steps:
        while at < len(ordered) and ordered[at] < step.began:
            at += 1
        if at < len(ordered) and ordered[at] < step.ended:
            found.add(step.number)
    return found


def _fences(row: Row, name: str, child: Child) -> dict[str, int]:
    """Fences by owner, over the whole case."""
    seen = worker(row, name, child)
    return dict(Counter(span.owner for span in seen.of("fence"))) if seen else {}


def _series(row: Row, name: str, child: Child) -> dict[str, list[float]]:
    """The median time between outputs by output length."""
    stamps = child.found["rows"][row.name][name]["stamps"]
    between = [(after - before) / 1e6 for before, after in pairwise(stamps)]
    if len(between) < 2:
        return {}
    size = max(1, -(-len(between) // POINTS))
    groups = [range(at, min(at + size, len(between))) for at in range(0, len(between), size)]
    return {
        "length": [float(group[-1] + 2) for group in groups],
        "ms": [statistics.median(between[at] for at in group) for group in groups],
    }


def _timeline(row: Row, name: str, child: Child) -> list[dict[str, Any]]:
    """Three steps from the middle of the case, in milliseconds."""
    seen = worker(row, name, child)
    steps = seen.steps() if seen else []
    if seen is None or len(steps) < 3:
        return []
    middle = len(steps) // 2
    began, ended = steps[middle - 1].began, steps[middle + 1].ended
    window = child.found["rows"][row.name][name]["window"]
    others = [each.within(*window) for each in child.probe if "rank" not in each.label]
    main = seen.header["thread"]
    return [
        {
            "track": _track(span, main),
            "name": f"fence: {span.owner}" if span.kind == "fence" else span.kind,
            "start": (max(span.began, began) - began) / 1e6,
            "end": (min(span.ended, ended) - began) / 1e6,
        }
        for process in (seen, *others)
        for span in process.spans
        if span.kind != "output" and span.ended > began and span.began < ended
    ]


def _track(span: Span, main: int) -> str:
    if span.kind == "readback":
        return "device to host"
    if span.kind in ("schedule", "update_from_output"):
        return "host"
    return "host" if span.thread == main else "output"


def _ms(nanoseconds: float | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6


def _median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if seen else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
