"""Generate docs/measurements.md from the committed runs.

    PYTHONPATH=scripts python -m bench.measurements [--check]

The text around the tables is scripts/bench/measurements.md. In it, `<!-- run: NAME -->` stands
for the tables of scripts/bench/runs/NAME.json, and `<!-- slower -->` for a table of every figure
that is worse than stock's. --check changes nothing, and fails if the file is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path
from typing import NamedTuple

from overlay import output

from bench.compare.installations import ROOT
from bench.errors import Failure
from bench.reports import figures, markdown
from bench.reports.run_file import Json, load, replace

TEMPLATE = ROOT / "scripts" / "bench" / "measurements.md"
RUNS = ROOT / "scripts" / "bench" / "runs"
PAGE = ROOT / "docs" / "measurements.md"
#: The figures that are published of each case of an engine run.
FIGURES = (
    "tokens/s",
    "ITL p50",
    "ITL p99",
    "sample_tokens p50",
    "sample_tokens p99",
    "get_output p50",
    "get_output p99",
    "fences, a step",
)
#: Differences below this that may be noise are not listed as slower.
EVEN = 0.03
_MARK = re.compile(r"^<!-- (slower|run: (\S+)) -->$", re.MULTILINE)


class Ratio(NamedTuple):
    """One figure of the overlaid side against stock's.

    Attributes:
        row: name of the run, and of its row if it has several.
        case: name of the case.
        figure: name of the figure.
        stock: stock's median.
        overlaid: the overlay's median.
        ratio: overlaid / stock.
        mark: "~" if the rounds overlap, else empty.
    """

    row: str
    case: str
    figure: str
    stock: float
    overlaid: float
    ratio: float
    mark: str

    @property
    def loss(self) -> float:
        """How many times worse than stock; 1 is even."""
        return 1 / self.ratio if self.figure.endswith("/s") else self.ratio


def page(text: str, folder: Path) -> str:
    """Return the page for a template's text.

    Args:
        text: of the template.
        folder: the directory with the runs.

    Raises:
        Failure: a run is missing, not named, or not fit to be published.
    """
    names = [name for _, name in _MARK.findall(text) if name]
    if unnamed := {file.stem for file in folder.glob("*.json")} - set(names):
        raise Failure(f"the template names no run {', '.join(sorted(unnamed))}; add or delete it")
    runs = {name: _publishable(name, folder) for name in names}

    def replaced(mark: re.Match[str]) -> str:
        lines = tables(runs[mark[2]]) if mark[2] else slower(runs)
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()

    return _MARK.sub(replaced, text)


def _publishable(name: str, folder: Path) -> Json:
    """Read a run that is whole and has enough rounds.

    Raises:
        Failure: it is missing, was cut off, failed in part, or has too few rounds.
    """
    file = folder / f"{name}.json"
    if not file.is_file():
        raise Failure(f"there is no run {file}; measure it, or do not name it")
    run = load(file)
    rows = run["rows"].values() if run["kind"] == "engine" else []
    few = [row for row in rows if row["rounds"] < figures.ENOUGH]
    marks = [cell for row in run["rows"] for cell in row if isinstance(cell, list)]
    if not run.get("complete", True) or run.get("errors"):
        raise Failure(f"{file} was cut off, or failed in part; measure it again or delete it")
    if few or any(mark == figures.FEW for _, mark in marks):
        raise Failure(f"{file} has rows of fewer than {figures.ENOUGH} rounds; measure them again")
    return run


def tables(run: Json) -> Iterator[str]:
    """Yield the lines that describe a run, and its tables."""
    for line in markdown.heading(run):
        yield from (line, "")
    if run["kind"] == "table":
        yield from markdown.table(run)
        return
    for name, row in run["rows"].items():
        yield from markdown.row_table(name, row, [], FIGURES)
        refused: dict[str, list[str]] = {}
        for label, case in row["cases"].items():
            if any(case["problems"].values()):
                refused.setdefault(markdown.verdict(case, row["sides"]), []).append(label)
        yield from (f"- {'; '.join(labels)}: {why}." for why, labels in refused.items())
        yield ""


def slower(runs: Mapping[str, Json]) -> list[str]:
    """Return the lines of the table of figures that are worse than stock's, worst first."""
    worse = [
        ratio
        for name, run in runs.items()
        for ratio in (_engine_ratios if run["kind"] == "engine" else _table_ratios)(name, run)
        if ratio.loss > 1 + EVEN * bool(ratio.mark)
    ]
    worse.sort(key=lambda ratio: ratio.loss, reverse=True)
    head = ["run", "case", "figure", "stock", "overlaid", "overlaid / stock"]
    cells = [
        [
            *ratio[:3],
            figures.number(ratio.stock),
            figures.number(ratio.overlaid),
            figures.number((ratio.ratio, ratio.mark) if ratio.mark else ratio.ratio, ratio=True),
        ]
        for ratio in worse
    ]
    return markdown.pipes(head, cells, ["l", "l", "l", "r", "r", "r"])


def _engine_ratios(name: str, run: Json) -> Iterator[Ratio]:
    for row_name, row in run["rows"].items():
        cases = row["cases"]
        for label, figure in product(cases, FIGURES):
            values = cases[label]["figures"].get(figure)
            if values and (value := figures.ratio(cases[label], figure, "overlaid")):
                pair = values["stock"], values["overlaid"]
                mark = figures.mark_of(values, "overlaid")
                yield Ratio(f"{name}, {row_name}", label, figure, *pair, value, mark)


def _table_ratios(name: str, run: Json) -> Iterator[Ratio]:
    """Yield those of a table with a figure a line; other tables hold no such ratios."""
    columns = run["columns"]
    if "figure" not in columns or "overlaid / stock" not in columns:
        return
    for row in run["rows"]:
        line = dict(zip(columns, row, strict=True))
        cell = line["overlaid / stock"]
        value, mark = cell if isinstance(cell, list) else (cell, "")
        if isinstance(value, float):
            pair = line["stock"], line["overlaid"]
            yield Ratio(name, line["case"], line["figure"], *pair, value, mark)


def main(argv: Sequence[str]) -> int:
    """Write the page, or check it; 0 if it is then up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    parser.add_argument("--page", type=Path, default=PAGE, help="(%(default)s)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory (%(default)s)")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="(%(default)s)")
    args = parser.parse_args(argv)
    try:
        wanted = page(args.template.read_text(encoding="utf-8"), args.runs)
        if not args.check:
            replace(args.page, wanted)
            return 0
        lines = args.page.read_text(encoding="utf-8").splitlines()
    except (Failure, OSError) as error:
        print(f"measurements: {error}", file=sys.stderr)
        return 1
    pairs = zip_longest(lines, wanted.splitlines(), fillvalue="nothing")
    for number, (line, wanted_line) in enumerate(pairs, 1):
        if line != wanted_line:
            text = f"{args.page} line {number} differs from the runs, which give: {wanted_line}"
            print(f"measurements: {text}; run bench.measurements", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("measurements", main))
