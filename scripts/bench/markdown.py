"""Runs as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bench.run import DISTURBED, FEW, LEAST, LEVEL, NOISE, Comparison, Run, figures

CUT_OFF = "**CUT OFF**: only the slices measured until then."
NOTE = (
    "`first` and `second` are medians over slices, times in ms. In a pair of slices the sides "
    "exchange places; its ratio is the geometric mean of both slices' ratios. The interval is "
    f"Student's over pairs, {1 - LEVEL:.0%} for each ratio. A ratio without a mark is a claim. "
    f"{NOISE}: the interval includes 1, or stock differs from itself by as much in some pair. "
    f"{FEW}: fewer than {LEAST} pairs, or no scipy. {DISTURBED}: fewer than {LEAST} undisturbed "
    "pairs. Of a hundred ratios of equal sides some five have no mark."
)
_HEAD = (
    *("engine", "case", "figure", "sides", "first", "second", "first / second"),
    *("low", "high", "pairs"),
)


def markdown(run: Run) -> str:
    """Return a run: machine, problems, the table of all pairs, and disturbances."""
    settings = ", ".join(f"`{name}={value}`" for name, value in run.environment.items())
    digests = ", ".join(f"{side} {digest[:12]}" for side, digest in run.digests.items())
    lines = [f"{run.device}, {run.host}, {run.date}", f"Commit {run.commit}. Digests: {digests}."]
    lines += [f"`{run.command}`", f"Environment: {settings}."]
    lines += [CUT_OFF] * (not run.complete) + [run.title]
    lines = [part for line in lines for part in (line, "")]
    lines += [*pipes(_HEAD, _rows(run), "llllrrrrrr"), "", NOTE, ""]
    for text in dict.fromkeys(run.problems):
        first, _, log = text.partition("\n")
        lines += [f"- **failed**: {first}", *(["", "````", log, "````", ""] if log else [])]
    for one in run.slices:
        place = f"{one.engine}, {one.case}, round {one.round}"
        lines += [f"- disturbed: {place}: {', '.join(one.disturbed)}"] if one.disturbed else []
    return "\n".join(lines).rstrip() + "\n"


def number(value: object, ratio: bool = False) -> str:
    """Format a value with four digits, a ratio with three decimals; "-" for None."""
    if not isinstance(value, float):
        return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
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


def ratio(compared: Comparison) -> str:
    """Format a ratio with its mark."""
    return f"{number(compared.ratio, ratio=True)} {compared.mark}".rstrip()


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; ``align`` holds "l" or "r" for each column."""
    marks = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows)]


def _rows(run: Run) -> Iterator[list[str]]:
    for group, of in run.groups().items():
        for figure in figures(of):
            compared = run.compare(group, figure)
            numbers = [number(compared.first), number(compared.second), ratio(compared)]
            bounds = [number(bound, ratio=True) for bound in (compared.low, compared.high)]
            names = [group[0], group[1], figure, "/".join(group[2])]
            yield [*names, *numbers, *bounds, number(compared.pairs)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
