"""Numbers and ratios as they are shown, and the marks of ratios that may mislead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bench.reports.run_file import Json

REFUSED = "refused"
#: The mark of a ratio whose sides overlap from round to round, and of one of fewer than
#: :data:`ENOUGH` rounds: of two rounds, equal sides lie apart once in three times.
NOISE, FEW = "~", "?"
ENOUGH = 3
MARKS = {
    NOISE: f"{NOISE} marks a ratio whose rounds overlap: the difference may be noise.",
    FEW: f"{FEW} marks a ratio of fewer than {ENOUGH} rounds, too few to tell it from noise.",
}
UNSEEN_NOTE = "- stands for a figure that was not measured, or not seen by the measuring process."


def number(value: object, ratio: bool = False) -> str:
    """Format a value with four digits, a ratio with three decimals.

    A pair is a value and its mark.
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if isinstance(value, list | tuple):
        return f"{number(value[0], ratio)} {value[1]}"
    if not isinstance(value, float):
        return f"{value:,}"
    size = abs(value)
    if size >= 999.95:
        return f"{value:,.0f}"
    if size == 0:
        return "0"
    decimals = 3 - math.floor(math.log10(size))
    if ratio:
        decimals = 0 if size >= 100 else 1 if size >= 10 else 3
    shown = f"{value:.{min(decimals, 4)}f}"
    return shown if float(shown) else f"{value:.1g}"


def others(sides: Iterable[str]) -> list[str]:
    """Return the sides that are compared with stock."""
    return [side for side in sides if side != "stock"]


def reasons(case: Json, side: str) -> list[str]:
    """Return why a side has no ratio to stock; empty if it may have one."""
    return [*case["problems"].get("stock", []), *case["problems"].get(side, [])]


def ratio(case: Json, figure: str, side: str) -> float | None:
    """Return a figure's ratio to stock; None where a problem refuses it."""
    if reasons(case, side):
        return None
    value: float | None = case["figures"][figure]["ratios"].get(side)
    return value


def ratio_text(case: Json, figure: str, side: str) -> str:
    """Format a figure's ratio to stock with its mark.

    Returns:
        "refused" where a problem refuses the ratio, or the run has none though both sides have
        the figure; "-" where a side lacks the figure; empty for a figure that is not compared.
    """
    values = case["figures"][figure]
    if side not in values["ratios"] and not reasons(case, side):
        return ""
    value = ratio(case, figure, side)
    if value is not None:
        return f"{number(float(value), ratio=True)} {mark_of(values, side)}".rstrip()
    seen = values.get("stock") and values.get(side) is not None
    return REFUSED if reasons(case, side) or seen else "-"


def mark_of(values: Json, side: str) -> str:
    """Return the mark of a figure's ratio to stock; empty if the rounds tell the sides apart."""
    return mark(*(values["rounds"].get(each, []) for each in ("stock", side)))


def mark(one: Sequence[float | None], other: Sequence[float | None]) -> str:
    """Return the mark of a ratio of medians: :data:`NOISE`, :data:`FEW`, or empty.

    Args:
        one: a side's value in each round, None where it was not seen.
        other: those of the other side.
    """
    seen = [[value for value in rounds if value is not None] for rounds in (one, other)]
    fewest = min(map(len, seen))
    if fewest > 1 and max(map(min, seen)) <= min(map(max, seen)):
        return NOISE
    return FEW if fewest < ENOUGH else ""
