"""Summarise what the sides returned: medians, ratios, and the problems that refuse a ratio."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.compare import outputs
from bench.compare.disturbance import Disturbance

#: The side that the others are compared with.
STOCK = "stock"
#: Stock beside itself: what it differs by is noise.
AGAIN = "stock again"
#: Figures that are also given as ratios to the baseline case of the same side.
_COSTS = ("tokens/s", "ITL p50", "ITL p50 of the last 32")
#: The figure whose best round is a figure of its own.
_BEST = "tokens/s"
#: How the figures begin that have no ratio to stock's. On stock only waits for events are seen as
#: fences; what counts the benchmark's own copies compares nothing.
_NOT_COMPARED = ("fence", "waiting in", "copies", "copy,", "ITL max")
#: Of which the worst round is shown, and not the median: a stall in one round is a stall.
_WORST = "ITL max"

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
        speeds: steps a second of each slice, where sides took slices by turns.
        disturbance: what disturbed it; see :mod:`bench.compare.disturbance`.
        prompts: digest of its prompts, where they are new in each round; else empty.
        clock: nanoseconds that it took on the child's clock, that it took with telling the parent,
            and that it took on the parent's clock, None if it was not heard.
    """

    figures: Figures
    outputs: Mapping[str, str]
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    problems: Sequence[str] = ()
    fences: Mapping[str, int] = field(default_factory=dict)
    speeds: Sequence[float] = ()
    disturbance: Disturbance | None = None
    prompts: str = ""
    clock: Sequence[int | None] = ()


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
        shown = {}
        for figure in names:
            choose = max if figure == _WORST else statistics.median
            shown[figure] = _figure(figure, seen, problems[name], choose)
            if figure == _BEST:
                shown[f"{_BEST}, fastest round"] = _figure(figure, seen, problems[name], max)
        return {
            "parameters": cases[name],
            "figures": shown,
            "fences": {side: [dict(one.fences) for one in results[side]] for side in sides},
            "counts": {side: [dict(one.counts) for one in results[side]] for side in sides},
            "problems": problems[name],
            "speeds": {side: [list(one.speeds) for one in results[side]] for side in sides},
            "disturbances": {side: [one.disturbance for one in results[side]] for side in sides},
        }

    return {
        "rounds": len(common),
        "compared": sorted(common),
        "sides": list(sides),
        "cases": {name: case(name) for name in cases},
    }


def _figure(
    name: str,
    seen: Mapping[str, Sequence[Figures]],
    problems: Mapping[str, Sequence[str]],
    choose: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, Any]:
    """Return each side's median and rounds of a figure, and the ratios to stock.

    Args:
        name: of the figure.
        seen: side to its figures by round.
        problems: side to the reasons why it has no ratio.
        choose: makes one value of the rounds', in place of their median.
    """
    rounds = {side: [values.get(name) for values in given] for side, given in seen.items()}
    medians = {side: _chosen(values, choose) for side, values in rounds.items()}
    ratios = {}
    for side in seen:
        if side != STOCK and not name.startswith(_NOT_COMPARED) and " / " not in name:
            refused = problems[side] or problems[STOCK]
            ratios[side] = None if refused else ratio(medians[side], medians[STOCK])
    return {**medians, "rounds": rounds, "ratios": ratios}


def _problems(name: str, sides: Sequence[str], children: Sequence[Child]) -> dict[str, list[str]]:
    """Return, for each side, why it has no ratio; a problem of several rounds is listed once.

    Every round of every side must return what stock's first round returned, or stock's same round
    where each round has prompts of its own.
    """
    problems: dict[str, list[str]] = {}
    for side in sides:
        ours = [child for child in children if child.side == side]
        rounds: dict[tuple[str, str], list[int]] = {}
        for child in ours:
            for problem in _of_child(name, child, children):
                rounds.setdefault(problem, []).append(child.round)
        problems[side] = [] if ours else [f"{side} was not measured"]
        for (before, text), numbers in rounds.items():
            of = f"{side} round{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
            problems[side].append(f"{before}{of}{' differ' if before else ''}: {text}")
    return problems


def _of_child(name: str, child: Child, children: Sequence[Child]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a child's case: what is put before the child's name, and a text."""
    result = child.cases[name]
    for kind, (n, m) in result.counts.items():
        if n != m:
            yield "", f"{n} of {m} {kind}"
    for text in result.problems:
        yield "", text
    stock = [one for one in children if one.side == STOCK]
    if result.prompts:
        stock = [one for one in stock if one.round == child.round]
        for one in children:
            if one.cases[name].prompts == result.prompts and one.round < child.round:
                yield "", f"its prompts are those of round {one.round}"
                break
    reference = next(iter(stock), child)
    if reference.cases[name].prompts != result.prompts:
        yield "", f"its prompts are not those of {reference.name}"
    for kind, where in differences(reference.cases[name], result):
        yield f"{kind} of {reference.name} and ", where


def differences(one: CaseResult, other: CaseResult) -> Iterator[tuple[str, str]]:
    """Yield the kind and place of each difference between what two children returned."""
    for kind, packed in one.outputs.items():
        if packed != other.outputs[kind]:
            yield kind, outputs.where(packed, other.outputs[kind])


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one / other; None if either was not seen, or the other is 0."""
    return one / other if one is not None and other else None


def _chosen(
    values: Sequence[float | None], choose: Callable[[Sequence[float]], float]
) -> float | None:
    seen = [value for value in values if value is not None]
    return choose(seen) if seen else None
