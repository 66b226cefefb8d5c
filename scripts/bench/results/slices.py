"""Slices, and the comparison of their sides.

A slice is one measurement of two sides, as JSON:

- "round" and "order": two slices of a round whose sides have exchanged places, "order" 0 and 1, are
  a pair. A slice with the order None is a pair by itself.
- "engine" and "case": the engine and the requests.
- "sides": the two sides; ratios are first / second.
- "figures": side to figure to value. Times are in ms, unless the name says "us".
- "problems": reasons against a ratio, such as outputs that differ.
- "disturbed": disturbances of a side measured alone; the slice counts for no interval.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.results.intervals import LEAST, interval

Slice = Mapping[str, Any]
#: Engine, case and sides.
Group = tuple[str, str, tuple[str, str]]

COMPILED = "compiled after ready"
UNANSWERED = "outputs without their logprobs"
DISTURBANCE = "disturbance"
BUSY = "device busy, %"
#: Marks of ratios that are no claims.
NOISE, FEW, DISTURBED = "~", "?", "!"
REFUSED = "refused"


class Comparison(NamedTuple):
    """Comparison of both sides in one figure.

    Attributes:
        first: median of the first side; None if not measured.
        second: median of the second side.
        ratio: first / second over all pairs; None without a ratio.
        low: lower bound of the interval.
        high: upper bound of the interval.
        pairs: number of pairs in the interval.
        mark: of a ratio that is no claim; empty for a claim.
    """

    first: float | None
    second: float | None
    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    mark: str


def grouped(slices: Iterable[Slice]) -> dict[Group, list[Slice]]:
    """Return the slices of each engine, case and pair of sides."""
    groups: dict[Group, list[Slice]] = {}
    for one in slices:
        first, second = one["sides"]
        groups.setdefault((one["engine"], one["case"], (first, second)), []).append(one)
    return groups


def figures(slices: Sequence[Slice]) -> list[str]:
    """Return the names of the figures of a group that are numbers."""
    names = dict.fromkeys(
        name for one in slices for side in one["sides"] for name in one["figures"][side]
    )
    return [name for name in names if name not in (COMPILED, UNANSWERED, DISTURBANCE)]


def noise(groups: Mapping[Group, Sequence[Slice]], group: Group) -> Sequence[Slice]:
    """Return the slices of stock against itself for an engine and a case; empty if not measured."""
    engine, case, _ = group
    of = (groups.get((engine, case, (again, "stock"))) for again in ("again", "stock again"))
    return next(filter(None, of), ())


def compare(
    slices: Sequence[Slice], figure: str, claims: int = 1, same: Sequence[Slice] = ()
) -> Comparison:
    """Compare the sides of a group.

    Values of the sides are divided, such as p99 by p99, and never values of single steps. The ratio
    of a pair is the geometric mean of its slices' ratios, and the ratio that is shown is that of
    all pairs; where slices have no order, it is the ratio of the medians.

    Args:
        slices: of one group.
        figure: its name.
        claims: number of ratios shown together; see :func:`bench.results.intervals.interval`.
        same: slices of stock against itself; a ratio no further from 1 than one of
            theirs is noise.
    """
    first, second = (_values(slices, figure, place) for place in (0, 1))
    one, other = (statistics.median(side) if side else None for side in (first, second))
    if not has_ratio(figure) or any(each.get("problems") for each in slices):
        return Comparison(one, other, None, None, None, 0, "")
    pairs, undisturbed = _pairs(slices, figure), _pairs(slices, figure, disturbed=False)
    if not pairs:
        # A run that was cut off may have slices without their counterparts.
        pairs = [found for each in slices if (found := _ratio(each, figure))]
        middle = statistics.geometric_mean(pairs) if pairs else None
        return Comparison(one, other, middle, None, None, 0, FEW if pairs else "")
    ratio = statistics.geometric_mean(undisturbed or pairs)
    if slices[0]["order"] is None and one and other:
        ratio = one / other
    bounds = interval(undisturbed, claims)
    if bounds is None:
        mark = DISTURBED if len(undisturbed) < LEAST <= len(pairs) else FEW
        return Comparison(one, other, ratio, None, None, len(undisturbed), mark)
    low, high = bounds
    # The ratio of the medians may lie on the other side of 1 than the mean of the ratios.
    claim = low > 1 < ratio or high < 1 > ratio
    floor = [max(each, 1 / each) for each in _pairs(same, figure)]
    claim = claim and max(ratio, 1 / ratio) > max(floor, default=1.0)
    return Comparison(one, other, ratio, low, high, len(undisturbed), "" if claim else NOISE)


def has_ratio(figure: str) -> bool:
    """Return whether a ratio of a figure says anything: a warm-up depends on what was compiled.

    A device that is busier has more to do, or does it more slowly.
    """
    return not figure.startswith("warm-up") and figure != BUSY


def more_is_better(figure: str) -> bool:
    """Return whether a larger value of a figure is better."""
    return figure.endswith("/s")


def loss(figure: str, ratio: float) -> float:
    """Return how many times worse the first side is; below 1 where it is better."""
    return 1 / ratio if more_is_better(figure) else ratio


def compiled(slices: Sequence[Slice], place: int) -> str:
    """Return the number and the names of the kernels compiled in the slices of a side."""
    names = Counter(
        name for one in slices for name in one["figures"][one["sides"][place]].get(COMPILED, ())
    )
    texts = [name if count == 1 else f"{name} x{count}" for name, count in names.items()]
    return f"{names.total()}{': ' * bool(texts)}{', '.join(texts)}"


def problems(slices: Iterable[Slice]) -> Iterator[str]:
    """Yield the problems of all slices, a line each."""
    for one in slices:
        place = f"{one['engine']}, {one['case']}, round {one['round']}"
        yield from (f"{place}: {text}" for text in one.get("problems", ()))


def disturbances(slices: Iterable[Slice]) -> Iterator[str]:
    """Yield the disturbances of all slices, a line each."""
    for one in slices:
        if texts := one.get("disturbed"):
            yield f"{one['engine']}, {one['case']}, round {one['round']}: {', '.join(texts)}"


def found_in(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the problems that the figures of a slice show by themselves."""
    texts = []
    for side, values in figures.items():
        if count := values.get(UNANSWERED):
            texts.append(f"{side}: {count} {UNANSWERED}")
        if values.get("tokens/s") == 0:
            texts.append(f"{side}: no tokens")
    return texts


def _values(slices: Sequence[Slice], figure: str, place: int) -> list[float]:
    values = (one["figures"][one["sides"][place]].get(figure) for one in slices)
    return [value for value in values if value is not None]


def _ratio(one: Slice, figure: str) -> float | None:
    # Where all tokens of most requests come at once, vLLM's client has a TPOT just below 0.
    first, second = (one["figures"][side].get(figure) or 0.0 for side in one["sides"])
    return first / second if first > 0 < second else None


def _pairs(slices: Sequence[Slice], figure: str, disturbed: bool = True) -> list[float]:
    """Return the ratio of each pair; with ``disturbed`` False, of the undisturbed ones."""
    rounds: dict[int, dict[int | None, float]] = {}
    for one in slices:
        if (ratio := _ratio(one, figure)) and (disturbed or not one.get("disturbed")):
            rounds.setdefault(one["round"], {})[one["order"]] = ratio
    whole = [of for of in rounds.values() if len(of) == 2 or None in of]
    return [statistics.geometric_mean(of.values()) for of in whole]
