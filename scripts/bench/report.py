"""A run as Markdown for a pull request, and as one page of HTML that needs nothing else.

    python scripts/bench/report.py RUN.json [--html FILE] [--markdown FILE]

Without either, the Markdown is printed. The page needs jinja2 and matplotlib. Neither shows a
ratio that the run refuses: both say why instead.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench.machine import SCHEMA  # noqa: E402
from bench.sides import Failure  # noqa: E402
from overlay import output  # noqa: E402

#: A run, a row, a case or a figure of it: what the JSON holds.
Found = Mapping[str, Any]

#: Kind of a run to what it has beside what every run has.
KINDS: Mapping[str, Sequence[str]] = {
    "engine": ("complete", "rows", "errors"),
    "table": ("title", "columns", "align", "rows", "problems"),
}
_EVERY = ("command", "date", "seconds", "machine", "versions", "digests")
#: What is said above a run that did not come to its end.
CUT_OFF = "**CUT OFF**: what was measured until then."
REFUSED = "refused"
#: Behind a ratio whose two sides overlap from round to round, and behind one of fewer than
#: :data:`ENOUGH` rounds: of two, sides that are alike lie apart once in three times.
NOISE, FEW = "~", "?"
ENOUGH = 3
MARKS = {
    NOISE: f"{NOISE} marks a ratio whose rounds overlap: the difference may be noise.",
    FEW: f"{FEW} marks a ratio of fewer than {ENOUGH} rounds, too few to tell it from noise.",
}
UNSEEN_NOTE = "What shows - was not measured, not seen from the process that measured, or refused."
#: What the page's summary shows of each case.
SUMMARY = (
    "tokens/s",
    "ITL p50",
    "ITL p99",
    "sample_tokens p99",
    "get_output p99",
    "fences, a step",
)


def load(path: Path) -> dict[str, Any]:
    """Read a run.

    Raises:
        Failure: it is not there, or is no run that this version knows.
    """
    try:
        run = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise Failure(f"{path} cannot be read as a run: {error}") from error
    if not isinstance(run, dict) or run.get("schema") != SCHEMA or run.get("kind") not in KINDS:
        raise Failure(
            f"{path} is no run of schema {SCHEMA}; name the JSON that a program of scripts/bench "
            "has written"
        )
    if lacking := [name for name in (*_EVERY, *KINDS[run["kind"]]) if name not in run]:
        raise Failure(f"{path} is no whole run: it lacks {', '.join(lacking)}")
    return run


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def number(value: object, ratio: bool = False) -> str:
    """A value as people read it: four digits, or three decimals of a ratio.

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


def ratio(case: Found, figure: str, side: str) -> float | None:
    """A figure's ratio of ``side`` to stock; None where a problem refuses it."""
    if reasons(case, side):
        return None
    value: float | None = case["figures"][figure]["ratios"].get(side)
    return value


def ratio_text(case: Found, figure: str, side: str) -> str:
    """The ratio as it is shown, with its mark if it has one; or why there is none.

    "refused": there are problems, or none are named though both sides have the figure.
    "-": a side lacks the figure. Empty: the figure is not one to be held against stock's.
    """
    values = case["figures"][figure]
    if side not in values["ratios"] and not reasons(case, side):
        return ""
    value = ratio(case, figure, side)
    if value is not None:
        found = doubt(values, side)
        return number((float(value), found) if found else float(value), ratio=True)
    seen = values.get("stock") and values.get(side) is not None
    return REFUSED if reasons(case, side) or seen else "-"


def reasons(case: Found, side: str) -> list[str]:
    """Why there is no ratio of ``side`` to stock; nothing if there may be one."""
    return [*case["problems"].get("stock", []), *case["problems"].get(side, [])]


def doubt(values: Found, side: str) -> str:
    """The mark of the ratio of ``side`` to stock; empty if the rounds tell them apart."""
    return mark(*(values["rounds"].get(each, []) for each in ("stock", side)))


def marked(
    ratio: float, one: Sequence[float | None], other: Sequence[float | None]
) -> float | list[float | str]:
    """A ratio of medians for a cell of a "table" run, with its mark if it has one."""
    found = mark(one, other)
    return [ratio, found] if found else ratio


def mark(one: Sequence[float | None], other: Sequence[float | None]) -> str:
    """The mark of a ratio of medians: :data:`NOISE`, :data:`FEW`, or nothing.

    Args:
        one: what was measured in each round of a side, None where it was not seen.
        other: the same of the other side.
    """
    seen = [[value for value in each if value is not None] for each in (one, other)]
    fewest = min(map(len, seen))
    if fewest > 1 and max(map(min, seen)) <= min(map(max, seen)):
        return NOISE
    return FEW if fewest < ENOUGH else ""


def others(sides: Iterable[str]) -> list[str]:
    """The sides that are held against stock."""
    return [side for side in sides if side != "stock"]


def refusals(run: Found) -> Iterator[tuple[str, str, str, str]]:
    """Row, case, side and problem, of everything that refuses a ratio."""
    for name, row in run["rows"].items():
        for label, case in row["cases"].items():
            for side, problems in case["problems"].items():
                for problem in problems:
                    yield name, label, side, problem


def heading(run: Found) -> list[str]:
    """What was measured on, when, and how to repeat it: sentences, and the command at the end."""
    machine, versions = run["machine"], run["versions"]
    driver = f" (driver {machine['driver']})" if machine["driver"] else ""
    digests = [f"{side} {digest[:12]}" for side, digest in run["digests"].items()]
    lines = [
        f"{machine['device']}{driver}, {machine['cores']} cores of {machine['cpu']}, "
        f"{run['date']}, {released(versions)}",
        f"Digests: {', '.join(digests)}." if digests else "",
        f"`{run['command']}`",
    ]
    return [line for line in lines if line]


def released(versions: Found) -> str:
    """The versions in a line."""
    names = {"vllm": "vLLM", "python": "Python"}
    return ", ".join(f"{names.get(key, key)} {v}" for key, v in versions.items() if v)


def shape(row: Found) -> str:
    """What a row's engine and requests are."""
    rounds = row["rounds"]
    return (
        f"batch {row['batch']}, {row['prompt']:,}-token prompts, {row['output']:,} output tokens, "
        f"{row['scheduling']} scheduling, {'one round' if rounds == 1 else f'{rounds} rounds'}"
    )


def fences(case: Found, side: str, steps: int) -> str:
    """The most fences of each owner in a round, and in a thousand of its steps."""
    rounds = case["fences"].get(side) or []
    if not any(rounds):
        return "none counted"
    owners = sorted({owner for counts in rounds for owner in counts})
    most = {owner: max(counts.get(owner, 0) for counts in rounds) for owner in owners}
    return ", ".join(
        f"{owner} {n:,} ({number(n / steps * 1e3)} a thousand steps)" for owner, n in most.items()
    )


def verdict(case: Found, sides: Iterable[str]) -> str:
    """Why a case has no ratio, side by side; or that nothing is wrong with it."""
    problems = [f"{side}: {text}" for side in sides for text in case["problems"].get(side, [])]
    return "; ".join(problems) or "counts as expected, outputs identical"


def markdown(run: Found) -> str:
    """The run for people: a table a row, and a line for all that refuses a ratio."""
    lines = heading(run)
    lines = [part for line in lines for part in (line, "")]
    if run["kind"] == "table":
        lines += [f"{run['title']}", "", *table(run)]
        lines += ["", *table_notes(run)]
        lines += ["", *(f"- {REFUSED}: {problem}" for problem in run["problems"])]
    else:
        lines += _engine(run)
    return "\n".join(lines).rstrip() + "\n"


def _engine(run: Found) -> list[str]:
    lines = []
    if not run["complete"]:
        lines += [CUT_OFF, ""]
    for error in run["errors"]:
        first, _, rest = error.partition("\n")
        lines += [f"FAILED: {first}", "", *(["````", rest, "````", ""] if rest else [])]
    every: list[str] = []
    for name, row in run["rows"].items():
        against = others(row["sides"])
        head = ["case", "figure", *row["sides"], *(f"{side} / stock" for side in against)]
        made = []
        for label, case in row["cases"].items():
            for figure, values in case["figures"].items():
                shown = [number(values.get(side)) for side in row["sides"]]
                shown += [ratio_text(case, figure, side) for side in against]
                made.append([label, figure, *shown])
        every += [cell for line in made for cell in line]
        lines += [
            f"**{name}**: {row['title']} ({row['source']}). {shape(row)}; medians, times in ms",
            "",
            *pipes(head, made, ["l", "l", *("r" for _ in head[2:])]),
            "",
        ]
        for label, case in row["cases"].items():
            counted = "; ".join(
                f"{side}: {fences(case, side, row['output'])}" for side in row["sides"]
            )
            lines.append(f"- {label}: {verdict(case, row['sides'])}. Fences by owner: {counted}.")
        lines.append("")
    return lines + notes(every)


def notes(cells: Sequence[str]) -> list[str]:
    """What the marks in these cells mean."""
    notes = [
        note for mark, note in MARKS.items() if any(cell.endswith(f" {mark}") for cell in cells)
    ]
    return notes + ([UNSEEN_NOTE] if "-" in cells else [])


def table(run: Found) -> list[str]:
    """The lines of a "table" run's table."""
    return pipes(run["columns"], table_cells(run), run["align"])


def table_cells(run: Found) -> list[list[str]]:
    """What the cells of a "table" run show."""
    return [
        [number(cell, " / " in column) for cell, column in zip(row, run["columns"], strict=True)]
        for row in run["rows"]
    ]


def table_notes(run: Found) -> list[str]:
    """What stands below a "table" run's table."""
    cells = [cell for row in table_cells(run) for cell in row]
    return [*([run["note"]] if run.get("note") else []), *notes(cells)]


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str]) -> list[str]:
    """A Markdown table; ``align`` holds "l" or "r" a column."""
    marks = ["---:" if each == "r" else "---" for each in align]
    cells = [head, marks, *rows]
    return [f"| {' | '.join(map(_cell, row))} |" for row in cells]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def publish(run: Found, file: Path | None) -> int:
    """Print a "table" run, and write it where asked; 0 unless something refuses a ratio."""
    print(markdown(run), end="")
    if file:
        replace(file, json.dumps(run, indent=1) + "\n")
    return 1 if run["problems"] else 0


def replace(path: Path, text: str) -> None:
    """Write a file so that whoever stops it leaves the one before."""
    staged = path.with_name(path.name + ".tmp")
    staged.write_text(text, encoding="utf-8")
    os.replace(staged, path)


def page(run: Found) -> str:
    """The run as one HTML page, which needs no other file and no network.

    Raises:
        Failure: jinja2 or matplotlib is not installed.
    """
    try:
        from bench.page import render
    except ImportError as error:
        raise Failure(
            f"the page needs jinja2 and matplotlib ({error}); make it where `make test` has made "
            "build/env: build/env/bin/python scripts/bench/report.py RUN.json --html FILE"
        ) from error
    return render(run)


def main(argv: Sequence[str]) -> int:
    """Write what is asked for; 0 if it could be made."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the JSON of a run")
    parser.add_argument("--html", type=Path, help="write the page to this file")
    parser.add_argument("--markdown", type=Path, help="write the Markdown to this file")
    args = parser.parse_args(argv)
    try:
        run = load(args.run)
        if args.html:
            args.html.write_text(page(run), encoding="utf-8")
        if args.markdown:
            args.markdown.write_text(markdown(run), encoding="utf-8")
        if not args.html and not args.markdown:
            print(markdown(run), end="")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
