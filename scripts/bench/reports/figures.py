"""Numbers and ratios as they are shown, and the marks of ratios that may mislead."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from bench.compare import disturbance
from bench.compare.intervals import Interval, interval
from bench.reports.run_file import Json

#: Stands for a ratio where outputs or counts differ; where a side was not measured; and where both
#: returned the same, but the measurement contradicts itself.
REFUSED, UNMEASURED, UNPROVEN = "refused", "not measured", "unproven"
WORDS = {
    REFUSED: f"{REFUSED}: the sides returned different outputs, or fewer than expected.",
    UNMEASURED: f"{UNMEASURED}: there is no such side here.",
    UNPROVEN: f"{UNPROVEN}: the outputs are the same, and the clocks or the probe contradict the "
    "figures.",
}
#: How a problem reads that is one of the outputs or counts.
_OUTPUTS = re.compile(r"\bdiffer\b|: \d+ of \d+ ")
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


def word(case: Json, side: str) -> str | None:
    """Return the word that stands for a side's ratios, if a problem refuses them."""
    texts = reasons(case, side)
    if not texts:
        return None
    absent = {f"{each} was not measured" for each in (side, "stock")}
    if any(text in absent for text in texts):
        return UNMEASURED
    return REFUSED if any(map(_OUTPUTS.search, texts)) else UNPROVEN


def missing(case: Json, figure: str, side: str) -> str:
    """Return what stands for a figure's ratio to stock where there is none.

    Returns:
        A word of :data:`WORDS` where a problem refuses the ratio, or the run has none though both
        sides have the figure; "-" where a side lacks the figure; empty for a figure that is not
        compared.
    """
    values = case["figures"][figure]
    if side not in values["ratios"] and not reasons(case, side):
        return ""
    seen = values.get("stock") and values.get(side) is not None
    return word(case, side) or (UNPROVEN if seen else "-")


def disturbed(case: Json, number: int, side: str) -> bool:
    """Return whether stock or a side was disturbed in a round, counted from 0."""
    seen = [case.get("disturbances", {}).get(each, ()) for each in ("stock", side)]
    return any(disturbance.reasons(one[number]) for one in seen if number < len(one))


def intervals(run: Json) -> dict[tuple[str, str, str], Interval]:
    """Return the ratios of steps a second to stock's, where the sides took slices by turns.

    Returns:
        By row, case and side. The level is corrected for how many there are. Rounds in which a side
        was disturbed do not count.
    """
    pairs = {}
    for name, row in run["rows"].items():
        for label, case in row["cases"].items():
            speeds = case.get("speeds") or {}
            for side in others(row["sides"]):
                if not reasons(case, side):
                    rounds = zip(speeds.get("stock", ()), speeds.get(side, ()), strict=False)
                    pairs[name, label, side] = [
                        [after / before for before, after in zip(*both, strict=False)]
                        for number, both in enumerate(rounds)
                        if not disturbed(case, number, side)
                    ]
    claims = sum(any(rounds) for rounds in pairs.values())
    found = {key: interval(rounds, claims) for key, rounds in pairs.items() if any(rounds)}
    return {key: value for key, value in found.items() if value is not None}
