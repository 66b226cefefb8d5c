"""The coordinates of a page's charts; the page's template draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bench.reports.figures import number
from bench.reports.run_file import Json

#: Size of the step-time chart in SVG units, and its margins left of and below the lines.
WIDTH, HEIGHT = 340, 180
LEFT, BELOW, ABOVE = 44, 34, 8
#: Where the host waits, to the figure that tells how long.
WAITS = {
    "sample_tokens": "waiting in sample_tokens, ms a step",
    "get_output": "waiting in get_output, ms a step",
}


def step_time(series: Json) -> dict[str, Any] | None:
    """Lay out step time against output length, a line for each side.

    Args:
        series: side to "length" in tokens and "ms".

    Returns:
        "lines" (side, points as SVG takes them, first and last value), and the grid lines "x"
        and "y" (position, label); None if no side has a point.
    """
    seen: dict[str, list[tuple[float, float]]] = {}
    for side, values in series.items():
        pairs = zip(values.get("length", ()), values.get("ms", ()), strict=False)
        if points := [(x, y) for x, y in pairs if x is not None and y is not None]:
            seen[side] = points
    if not seen:
        return None
    longest = max(x for points in seen.values() for x, _ in points)
    slowest = max(y for points in seen.values() for _, y in points)
    x_ticks, y_ticks = ticks(longest), ticks(slowest)
    right, top = max(longest, x_ticks[-1]) or 1, max(slowest, y_ticks[-1]) or 1

    def across(x: float) -> float:
        return round(LEFT + x / right * (WIDTH - LEFT - 12), 1)

    def down(y: float) -> float:
        return round(HEIGHT - BELOW - y / top * (HEIGHT - BELOW - ABOVE), 1)

    return {
        "lines": [
            {
                "side": side,
                "points": " ".join(f"{across(x)},{down(y)}" for x, y in points),
                "text": " → ".join(number(float(points[end][1])) for end in (0, -1)) + " ms",
            }
            for side, points in seen.items()
        ],
        "x": [(across(x), number(x) if x % 1 else f"{x:,.0f}") for x in x_ticks],
        "y": [(down(y), f"{y:,g}") for y in y_ticks],
        "size": (WIDTH, HEIGHT, LEFT, HEIGHT - BELOW),
    }


def ticks(high: float) -> list[float]:
    """Return from two to six round numbers from 0 up to ``high``."""
    if high <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(high))
    step = next(m * power for m in (0.2, 0.5, 1.0, 2.0) if high / (m * power) <= 5)
    return [round(n * step, 9) for n in range(int(high / step) + 1)]


def waits(cases: Json, sides: Sequence[str]) -> list[dict[str, Any]]:
    """Lay out where the host waits in a step, a bar for each case and side that was seen.

    Returns:
        Of each bar: "case", "side", "text", and "parts" (part, percent of the longest bar).
    """
    bars: list[tuple[str, str, dict[str, float]]] = []
    for label, case in cases.items():
        for side in sides:
            values = {
                part: case["figures"].get(figure, {}).get(side) for part, figure in WAITS.items()
            }
            if any(value is not None for value in values.values()):
                bars.append((label, side, {part: v or 0.0 for part, v in values.items()}))
    longest = max((sum(parts.values()) for _, _, parts in bars), default=0) or 1
    return [
        {
            "case": label,
            "side": side,
            "text": f"{number(sum(parts.values()))} ms",
            "parts": [(part, round(value / longest * 100, 2)) for part, value in parts.items()],
        }
        for label, side, parts in bars
    ]
