"""Runs as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.results import slices
from bench.results.intervals import LEAST, LEVEL
from bench.results.run_file import Json
from bench.results.slices import DISTURBED, FEW, NOISE, REFUSED, Comparison

HEAD = (
    *("engine", "case", "figure", "sides", "first", "second", "first / second"),
    *("low", "high", "pairs"),
)
_ALIGN = "llllrrrrrr"
CUT_OFF = "**CUT OFF**: only the slices measured until then."
NOTE = (
    "`first` and `second` are medians over slices, times in ms. In a pair of slices the sides "
    "exchange places; its ratio is the geometric mean of both slices' ratios. Where sides have not "
    "exchanged places, the ratio is that of the medians. The interval is Student's over pairs, "
    f"{1 - LEVEL:.0%} for each ratio. A ratio without a mark is a claim. {NOISE}: the interval "
    "includes 1, or stock differs from itself by as much in some pair. "
    f"{FEW}: fewer than {LEAST} pairs, or no scipy. {DISTURBED}: fewer than {LEAST} undisturbed "
    f"pairs. {REFUSED}: see the problems below. Of a hundred ratios of equal sides some five have "
    f"no mark. `{slices.COMPILED}` lists the kernels compiled after a side was ready."
)


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


def ratio(compared: Comparison, refused: bool = False) -> str:
    """Format a ratio with its mark."""
    if compared.ratio is None:
        return REFUSED if refused else "-"
    return f"{number(float(compared.ratio), ratio=True)} {compared.mark}".rstrip()


def heading(run: Json) -> list[str]:
    """Return the lines on machine, versions, digests, command and environment."""
    machine, names = run["machine"], {"vllm": "vLLM", "python": "Python"}
    driver = f" (driver {machine['driver']})" if machine["driver"] else ""
    versions = ", ".join(f"{names.get(key, key)} {v}" for key, v in run["versions"].items() if v)
    digests = ", ".join(f"{side} {digest[:12]}" for side, digest in run["digests"].items())
    settings = ", ".join(f"`{name}={value}`" for name, value in run.get("environment", {}).items())
    lines = [
        f"{machine['device']}{driver}, {machine['cores']} cores of {machine['cpu']}, "
        f"{run['date']}, {versions}",
        f"Digests: {digests}." if digests else "",
        f"`{run['command']}`",
        f"Environment: {settings}." if settings else "",
    ]
    return [line for line in lines if line]


def rows(of: Iterable[slices.Slice], claims: int = 1) -> Iterator[list[str]]:
    """Yield the cells of each figure of each group; see :data:`HEAD`."""
    groups = slices.grouped(of)
    for (engine, case, sides), group in groups.items():
        same = slices.noise(groups, (engine, case, sides)) if "again" not in sides[0] else ()
        refused, pair = any(one.get("problems") for one in group), "/".join(sides)
        for figure in slices.figures(group):
            compared = slices.compare(group, figure, claims, same)
            numbers = [number(compared.first), number(compared.second), ratio(compared, refused)]
            bounds = [number(bound, ratio=True) for bound in (compared.low, compared.high)]
            yield [engine, case, figure, pair, *numbers, *bounds, number(compared.pairs)]
        if any(slices.COMPILED in side for one in group for side in one["figures"].values()):
            texts = [slices.compiled(group, place) for place in (0, 1)]
            yield [engine, case, slices.COMPILED, pair, *texts, *"----"]


def markdown(run: Json) -> str:
    """Return the run: machine, problems, the table of all pairs, and disturbances."""
    lines = [part for line in heading(run) for part in (line, "")]
    if not run["complete"]:
        lines += [CUT_OFF, ""]
    listed = list(dict.fromkeys([*run["problems"], *slices.problems(run["slices"])]))
    lines += [run["title"], "", *pipes(HEAD, rows(run["slices"]), _ALIGN), "", NOTE, ""]
    for text in listed:
        first, _, log = text.partition("\n")
        lines += [f"- {REFUSED}: {first}", *(["", "````", log, "````", ""] if log else [])]
    lines += [f"- disturbed: {text}" for text in slices.disturbances(run["slices"])]
    return "\n".join(lines).rstrip() + "\n"


def pipes(head: Sequence[str], rows: Iterable[Sequence[Any]], align: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; ``align`` holds "l" or "r" for each column."""
    marks = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
