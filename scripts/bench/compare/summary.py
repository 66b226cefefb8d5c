"""Summarise what the sides returned: medians, ratios, and the problems that refuse a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.compare import outputs

#: The side that the others are compared with.
STOCK = "stock"
#: Figures that are also given as ratios to the baseline case of the same side.
_COSTS = ("tokens/s", "ITL p50", "ITL p50 of the last 32")
#: How the figures begin that have no ratio to stock's. On stock only waits for events are seen as
#: fences; what counts the benchmark's own copies compares nothing.
_NOT_COMPARED = ("fence", "waiting in", "copies", "copy,")

#: Figure to its value, None if it was not seen. Times are in milliseconds.
Figures = dict[str, float | None]


@dataclass
class CaseResult:
    """One case on one side in one round.

    Attributes:
        figures: its figures.
        outputs: kind to what the requests returned, packed; see :mod:`bench.compare.outputs`.
        counts: kind to the numbers of outputs received and expected.
        problems: why it has no ratio, besides its counts and outputs.
        fences: owner to the number of fences.
    """

    figures: Figures
    outputs: Mapping[str, str]
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    problems: Sequence[str] = ()
    fences: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Child:
    """One side in one round, counted from 1, and its results by case."""

    side: str
    round: int
    cases: Mapping[str, CaseResult]

    @property
    def name(self) -> str:
        """Side and round."""
        return f"{self.side} round {self.round}"


def summarise(
    cases: Mapping[str, Any],
    sides: Sequence[str],
    children: Sequence[Child],
    baseline: str | None = None,
) -> dict[str, Any]:
    """Return the JSON of the cases that are measured together.

    Args:
        cases: name to parameters.
        sides: those that were to be measured.
        children: the finished ones. Problems are looked for in all of them; figures are those of
            the rounds that every measured side has.
        baseline: the case that the others' costs are ratios to.
    """
    rounds = [{child.round for child in children if child.side == side} for side in sides]
    # Medians of different rounds would not be comparable.
    common = set.intersection(*filter(None, rounds)) if children else set()
    problems = {name: _problems(name, sides, children) for name in cases}
    if children and not common:
        for texts in problems.values():
            texts[STOCK].append("no round was measured on every side")

    def figures(child: Child, name: str) -> Figures:
        values = dict(child.cases[name].figures)
        if baseline is not None and baseline != name:
            base = child.cases[baseline].figures
            refused = problems[name][child.side] or problems[baseline][child.side]
            for figure in _COSTS:
                cost = None if refused else ratio(values.get(figure), base.get(figure))
                values[f"{figure} / {baseline}"] = cost
        return values

    def case(name: str) -> dict[str, Any]:
        of_side = {
            side: [child for child in children if child.side == side and child.round in common]
            for side in sides
        }
        seen = {side: [figures(child, name) for child in of_side[side]] for side in sides}
        results = {side: [child.cases[name] for child in of_side[side]] for side in sides}
        names = dict.fromkeys(key for values in seen.values() for one in values for key in one)
        return {
            "parameters": cases[name],
            "figures": {figure: _figure(figure, seen, problems[name]) for figure in names},
            "fences": {side: [dict(one.fences) for one in results[side]] for side in sides},
            "counts": {side: [dict(one.counts) for one in results[side]] for side in sides},
            "problems": problems[name],
        }

    return {
        "rounds": len(common),
        "compared": sorted(common),
        "sides": list(sides),
        "cases": {name: case(name) for name in cases},
    }


def _figure(
    name: str, seen: Mapping[str, Sequence[Figures]], problems: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return each side's median and rounds of a figure, and the ratios to stock."""
    rounds = {side: [values.get(name) for values in given] for side, given in seen.items()}
    medians = {side: _median(values) for side, values in rounds.items()}
    ratios = {}
    for side in seen:
        if side != STOCK and not name.startswith(_NOT_COMPARED) and " / " not in name:
            refused = problems[side] or problems[STOCK]
            ratios[side] = None if refused else ratio(medians[side], medians[STOCK])
    return {**medians, "rounds": rounds, "ratios": ratios}


def _problems(name: str, sides: Sequence[str], children: Sequence[Child]) -> dict[str, list[str]]:
    """Return, for each side, why it has no ratio; a problem of several rounds is listed once.

    Every round of every side must return what stock's first round returned.
    """
    problems: dict[str, list[str]] = {}
    stock = next((child for child in children if child.side == STOCK), None)
    for side in sides:
        ours = [child for child in children if child.side == side]
        rounds: dict[tuple[str, str], list[int]] = {}
        for child in ours:
            result, reference = child.cases[name], stock or ours[0]
            counts = [f"{n} of {m} {kind}" for kind, (n, m) in result.counts.items() if n != m]
            texts = [("", text) for text in (*counts, *result.problems)]
            for kind, where in differences(reference.cases[name], result):
                texts.append((f"{kind} of {reference.name} and ", where))
            for problem in texts:
                rounds.setdefault(problem, []).append(child.round)
        problems[side] = [] if ours else [f"{side} was not measured"]
        for (before, text), numbers in rounds.items():
            of = f"{side} round{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            problems[side].append(f"{before}{of}{' differ' if before else ''}: {text}")
    return problems


def differences(one: CaseResult, other: CaseResult) -> Iterator[tuple[str, str]]:
    """Yield the kind and place of each difference between what two children returned."""
    for kind, packed in one.outputs.items():
        if packed != other.outputs[kind]:
            streams = outputs.unpack(packed), outputs.unpack(other.outputs[kind])
            yield kind, outputs.first_difference(*streams) or "in how they are stored"


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one / other; None if either was not seen, or the other is 0."""
    return one / other if one is not None and other else None


def _median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if seen else None
