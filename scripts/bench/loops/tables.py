"""The table of a run of :mod:`bench.traffic`, and of several runs together.

    python -m bench.loops.tables RUN.json... OUT.json

OUT gets the slices of all runs as one run, and the table is printed.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.compare.intervals import LEAST, interval
from bench.errors import Failure
from bench.reports.claims import FEW, NOISE, marked
from bench.reports.markdown import markdown
from bench.reports.run_file import load, replace

COLUMNS = (
    *("engine", "case", "figure", "sides", "first", "second", "first / second"),
    *("low", "high", "pairs"),
)
#: The first columns, which hold text.
TEXTS = 4
COMPILED = "compiled after ready"
_UNANSWERED = "outputs without their logprobs"
#: Figures without a ratio: other traffic, or less of it, gives others.
_WITHOUT = ("steps", "warm-up", _UNANSWERED)
NOTE = (
    "`first` and `second` are medians over slices, times in ms. A pair is two slices of which the "
    "second has the sides in exchanged places; the ratio of a pair is the geometric mean of its "
    f"two, and the interval is Student's over pairs, 95% for each ratio. {NOISE} marks a ratio "
    f"whose interval includes 1, {FEW} one of fewer than {LEAST} pairs: no claim. Of a hundred "
    "ratios of equal sides some five have no mark; `again/stock` and `copy/stock` show it. "
    f"`{COMPILED}` lists what a side compiled that had compiled nothing before its first start."
)


def table(slices: Sequence[Mapping[str, Any]], about: str) -> dict[str, Any]:
    """Return the title, note, rows and problems of the slices of a run.

    Args:
        slices: each with its "round", "order", "engine", "case", "sides" and "figures".
        about: how long they are.
    """
    return {
        "title": f"Closed-loop traffic, {about}.",
        "note": NOTE,
        "rows": list(_rows(slices)),
        "problems": list(_problems(slices)),
    }


def _rows(slices: Sequence[Mapping[str, Any]]) -> Iterator[list[Any]]:
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in slices:
        groups.setdefault((one["engine"], one["case"], "/".join(one["sides"])), []).append(one)
    for (engine, case, sides), of in groups.items():
        figures = [{side: one["figures"][side] for side in one["sides"]} for one in of]
        names = dict.fromkeys(name for one in figures for side in one.values() for name in side)
        for name in names:
            if name == COMPILED:
                yield [engine, case, name, sides, *_compiled(of), None, None, None, None]
            elif name not in ("disturbance", _UNANSWERED):
                yield [engine, case, name, sides, *_cells(of, name)]


def _cells(slices: Sequence[Mapping[str, Any]], figure: str) -> Iterator[Any]:
    """Yield the medians of both sides, their ratio, its interval, and the number of pairs."""
    values = [[one["figures"][side].get(figure) for side in one["sides"]] for one in slices]
    rounds: dict[int, list[float]] = {}
    for one, (first, second) in zip(slices, values, strict=True):
        if first and second and not figure.startswith(_WITHOUT):
            rounds.setdefault(one["round"], []).append(first / second)
    for place in (0, 1):
        there = [of[place] for of in values if of[place] is not None]
        yield statistics.median(there) if there else None
    pairs = [ratios for ratios in rounds.values() if len(ratios) == 2]
    # A run that was cut off may have no pair.
    shown = [statistics.geometric_mean(ratios) for ratios in pairs or rounds.values()]
    found = interval(pairs, 1)
    yield marked(statistics.median(shown), found) if shown else None
    yield from (found.low, found.high) if found else (None, None)
    yield len(pairs) if shown else None


def told(figures: Mapping[str, Mapping[str, Any]], sides: Sequence[str]) -> str:
    """Return the first figure that both sides of a slice have, in words."""
    first, second = (figures[side] for side in sides)
    name = next(name for name in first if name in second and not name.startswith(_WITHOUT))
    return f"{name} {first[name]:,.4g} / {second[name]:,.4g}"


def _compiled(slices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each side, the number and the names of what was compiled in its slices."""
    for place in (0, 1):
        names = Counter(
            name for one in slices for name in one["figures"][one["sides"][place]].get(COMPILED, ())
        )
        texts = [name if count == 1 else f"{name} x{count}" for name, count in names.items()]
        yield f"{names.total()}{': ' * bool(texts)}{', '.join(texts)}"


def _problems(slices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which slices did not measure what their row says."""
    for one in slices:
        for side, figures in one["figures"].items():
            place = f"{one['engine']}, {one['case']}, round {one['round']}, {side}"
            if count := figures.get(_UNANSWERED):
                yield f"{place}: {count} {_UNANSWERED}"
            if figures.get("tokens/s") == 0:
                yield f"{place}: no tokens"


def joined(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one run with the slices of all.

    Raises:
        Failure: they are not runs of this program, or not of the same installations and machine.
    """
    first, slices, base = runs[0], [], 0
    for one in runs:
        if tuple(one.get("columns", ())) != COLUMNS:
            raise Failure(f"{one['command']} is not a run of bench.traffic")
        same = {**first["digests"], **one["digests"]} == {**one["digests"], **first["digests"]}
        if not same or one["machine"]["device"] != first["machine"]["device"]:
            raise Failure(f"{one['command']} has other installations, or another device")
        slices += [{**each, "round": base + each["round"]} for each in one["rounds"]]
        base = max((each["round"] for each in slices), default=base)
    about = first["title"].partition(", ")[2].rstrip(".")
    made = table(slices, about)
    errors = [text for one in runs for text in one["problems"] if text not in made["problems"]]
    return {
        **first,
        "command": "; ".join(one["command"] for one in runs),
        "seconds": sum(one["seconds"] for one in runs),
        "digests": {name: each for one in runs for name, each in one["digests"].items()},
        "complete": all(one["complete"] for one in runs),
        "note": made["note"],
        "rows": made["rows"],
        "rounds": slices,
        "problems": [*errors, *made["problems"]],
    }


def main(argv: Sequence[str]) -> int:
    """Join runs, and print their table."""
    *files, out = map(Path, argv)
    try:
        run = joined([load(file) for file in files])
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    replace(out, json.dumps(run, indent=1))
    print(markdown(run))
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
