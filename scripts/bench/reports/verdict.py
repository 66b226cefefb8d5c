"""How the overlay compares with stock in each case of a run, in a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bench.compare.intervals import Interval
from bench.engines.rows import BASELINE
from bench.reports.claims import FEW, Claims, more_is_better
from bench.reports.figures import intervals, number, ratio, word
from bench.reports.run_file import Json

SIDE = "overlaid"
_SPEED = "tokens/s"
_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def verdicts(run: Json, claims: Claims) -> list[str]:
    """Return the lines on top of a run: the comparison of each case, row by row."""
    if run["kind"] != "engine":
        return []
    slices = intervals(run)
    lines = []
    for name, row in run["rows"].items():
        if SIDE in row["sides"]:
            lines.append(f"- **{name}**{_shape(row)}")
            lines += [f"  - {said}" for said in _cases(name, row, claims, slices)]
    return ["**Overlaid, beside stock:**", "", *lines, ""] if lines else []


def _shape(row: Json) -> str:
    count = row["rounds"]
    rounds = f"{_NUMBERS[count] if count < len(_NUMBERS) else count} round{'s' * (count != 1)}"
    tokens = f"{row['output']:,} tokens, " if "output" in row else ""
    # An engine's requests all begin and end together; a server's, in a "shape", come and go.
    steady = "steady batches, " if "batch" in row and "shape" not in row else ""
    return f", {steady}{tokens}{rounds}"


def _cases(
    row_name: str, row: Json, claims: Claims, slices: Mapping[tuple[str, str, str], Interval]
) -> Iterator[str]:
    for label, case in row["cases"].items():
        found = slices.get((row_name, label, SIDE))
        said, *more = _said(case, claims) if found is None else _by_turns(found)
        details = ", ".join([*more, *_absolute(case)])
        name = "plain" if label == BASELINE else label
        yield f"{name}: {said}{f' ({details})' if details else ''}"


def _said(case: Json, claims: Claims) -> Iterator[str]:
    """Yield how a case compares with stock, and what is to be added in parentheses."""
    if (missing := word(case, SIDE)) is not None:
        yield missing
        return
    figure = next((each for each in (_SPEED, *case["figures"]) if _has_ratio(case, each)), None)
    value = ratio(case, figure, SIDE) if figure else None
    if figure is None or value is None:
        yield "no ratio"
        return
    shown = f"{value:.3g} times the {figure}"
    mark = claims.mark(case, figure, SIDE)
    found = claims.interval(case, figure, SIDE)
    if mark == FEW or found is None:
        why = "not enough rounds" if mark == FEW else "too disturbed"
        yield from (f"{why} for a claim", shown)
    elif mark:
        between = f"between {found.low:.3g} and {found.high:.3g} times the {figure}"
        yield from ("no difference shown", between)
    else:
        worse = "" if (value > 1) == more_is_better(figure) else ", which is worse"
        yield f"**{shown}**{worse}"


def _by_turns(found: Interval) -> Iterator[str]:
    """Yield what slices say, which the sides took by turns: noise meets them alike."""
    between = f"{found.low:.3g} to {found.high:.3g}, slices by turns"
    if found.excludes(1.0):
        worse = "" if found.ratio > 1 else ", which is worse"
        yield from (f"**{found.ratio:.3g} times the steps/s**{worse}", between)
    else:
        yield from ("no difference shown", f"{found.ratio:.3g} times the steps/s, {between}")


def _has_ratio(case: Json, figure: str) -> bool:
    return figure in case["figures"] and ratio(case, figure, SIDE) is not None


def _absolute(case: Json) -> Iterator[str]:
    """Yield the tokens a second and the time between tokens of both sides, where there are any."""
    for figure, before, after in ((_SPEED, "", " tokens/s"), ("ITL p50", "ITL ", " ms")):
        values = case["figures"].get(figure, {})
        one, other = values.get("stock"), values.get(SIDE)
        if one is not None and other is not None:
            yield f"{before}{number(one)} to {number(other)}{after}"
