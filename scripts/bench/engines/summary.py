"""Summarise the children of a run: medians, ratios, and the problems that refuse a ratio."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from bench.engines.rows import BASELINE, Row
from bench.engines.step_figures import LAST, Child, Figures, case_figures, differences, ratio

#: The side that the others are compared with.
STOCK = "stock"
#: Points of a step-time series.
POINTS = 48
#: Figures that are also given as ratios to the baseline case of the same side.
_COSTS = ("tokens/s", "ITL p50", f"ITL p50 of the last {LAST}")

#: The result of :func:`case_figures` for each child, by the child's id.
_Seen = Mapping[int, tuple[Figures, list[str]]]


def summarise(
    row: Row, sides: Sequence[str], children: Sequence[Child], model: str | None = None
) -> dict[str, Any]:
    """Return the run's JSON of one row.

    Args:
        row: the row.
        sides: those that were to be measured.
        children: the finished ones of the row's engine. Problems are looked for in all of them;
            figures are those of the rounds that every measured side has.
        model: name of a model with weights; None: the generated one.
    """
    engine = row.engine
    rounds = {side: {c.round for c in children if c.side == side} for side in sides}
    # Medians of different rounds would not be comparable.
    common = set.intersection(*filter(None, rounds.values())) if children else set()
    compared = [child for child in children if child.round in common]
    asynchronous = {child.result["async scheduling"] for child in children}
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


def _cases(
    row: Row, sides: Sequence[str], children: Sequence[Child], compared: Sequence[Child]
) -> dict[str, Any]:
    seen: dict[str, _Seen] = {
        name: {id(child): case_figures(row, name, child) for child in children}
        for name in row.cases
    }
    problems = {name: _problems(row, name, sides, children, seen[name]) for name in row.cases}
    if children and not compared:
        for texts in problems.values():
            texts[STOCK].append("no round was measured on every side")
    for name in row.cases:
        for child in children:
            values, (base, _) = seen[name][id(child)][0], seen[BASELINE][id(child)]
            if problems[name][child.side]:
                values.update({figure: None for figure in values if " / " in figure})
            if name != BASELINE:
                refused = problems[name][child.side] or problems[BASELINE][child.side]
                for figure in _COSTS:
                    cost = None if refused else ratio(values.get(figure), base.get(figure))
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
    of_side = {side: [c for c in children if c.side == side] for side in sides}
    figures = {}
    for figure in dict.fromkeys(key for child in children for key in seen[id(child)][0]):
        rounds = {side: [seen[id(c)][0].get(figure) for c in of_side[side]] for side in sides}
        medians = {side: _median(values) for side, values in rounds.items()}
        ratios = {
            side: None
            if problems[side] or problems[STOCK]
            else ratio(medians[side], medians[STOCK])
            for side in sides
            if side != STOCK and not _not_compared(figure)
        }
        figures[figure] = {**medians, "rounds": rounds, "ratios": ratios}
    return {
        "parameters": asdict(row.cases[name]),
        "figures": figures,
        "fences": {side: [_fences(row, name, c) for c in of_side[side]] for side in sides},
        "counts": {side: [c.case(row, name)["counts"] for c in of_side[side]] for side in sides},
        "problems": problems,
        "series": {
            side: _series(given[0].case(row, name)["stamps"])
            for side, given in of_side.items()
            if given
        },
    }


def _not_compared(figure: str) -> bool:
    """Return whether a figure has no ratio to stock's.

    On stock only waits for events are seen as fences. What is a ratio already, or counts what
    the benchmark did, has no meaningful ratio.
    """
    words = ("fence", "waiting in", "steps begun", "copies", "copy,")
    return figure.startswith(words) or " / " in figure


def _problems(
    row: Row, name: str, sides: Sequence[str], children: Sequence[Child], seen: _Seen
) -> dict[str, list[str]]:
    """Return, for each side, why it has no ratio; a problem of several rounds is listed once."""
    problems: dict[str, list[str]] = {}
    stock = next((child for child in children if child.side == STOCK), None)
    for side in sides:
        ours = [child for child in children if child.side == side]
        rounds: dict[tuple[str, str], list[int]] = {}
        for child in ours:
            case, reference = child.case(row, name), stock or ours[0]
            for text in (*case["problems"], *seen[id(child)][1]):
                rounds.setdefault(("", text), []).append(child.round)
            for kind, where in differences(reference.case(row, name), case):
                rounds.setdefault((f"{kind} of {reference.name} and ", where), []).append(
                    child.round
                )
        problems[side] = [] if ours else [f"{side} was not measured"]
        for (before, text), numbers in rounds.items():
            of = f"{side} round{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            problems[side].append(f"{before}{of}{' differ' if before else ''}: {text}")
    return problems


def _fences(row: Row, name: str, child: Child) -> dict[str, int]:
    """Count the fences of the whole case by owner."""
    seen = child.worker(row, name)
    return dict(Counter(span.owner for span in seen.of("fence"))) if seen else {}


def _series(stamps: Sequence[int]) -> dict[str, list[float]]:
    """Return the median time between outputs, by output length in tokens."""
    between = [(after - before) / 1e6 for before, after in pairwise(stamps)]
    if len(between) < 2:
        return {}
    size = max(1, -(-len(between) // POINTS))
    starts = range(0, len(between), size)
    return {
        "length": [float(min(n + size, len(between)) + 1) for n in starts],
        "ms": [statistics.median(between[n : n + size]) for n in starts],
    }


def _median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if seen else None
