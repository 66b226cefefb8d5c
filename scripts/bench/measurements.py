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
from itertools import product
from pathlib import Path

from overlay import output

from bench import step
from bench.compare.installations import ROOT
from bench.errors import Failure
from bench.reports import figures, markdown
from bench.reports.run_file import Json, load, replace
from bench.servers import results

TEMPLATE = ROOT / "scripts" / "bench" / "measurements.md"
RUNS = ROOT / "scripts" / "bench" / "runs"
PAGE = ROOT / "docs" / "measurements.md"
#: The figures that are published of each case.
FIGURES = dict.fromkeys(
    (
        *("tokens/s", "ITL p50", "ITL p99", "execute_model p50"),
        *("sample_tokens p50", "sample_tokens p99"),
        *("get_output p50", "get_output p99", "fences, a step"),
        *(*results.FIGURES, *step.FIGURES.values()),
    )
)
#: Differences below this that may be noise are not listed as slower.
EVEN = 0.03
_MARK = re.compile(r"^<!-- (slower|run: (\S+)) -->$", re.MULTILINE)


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
    worse: list[tuple[float, list[str]]] = []
    for *names, stock, overlaid, ratio, mark in _ratios(runs):
        loss = 1 / ratio if names[-1].endswith("/s") else ratio
        if loss > 1 + EVEN * bool(mark):
            shown = figures.number((ratio, mark) if mark else ratio, ratio=True)
            worse.append((loss, [*names, figures.number(stock), figures.number(overlaid), shown]))
    worse.sort(key=lambda line: line[0], reverse=True)
    head = ["run", "case", "figure", "stock", "overlaid", "overlaid / stock"]
    return markdown.pipes(head, [cells for _, cells in worse], ["l", "l", "l", "r", "r", "r"])


def _ratios(runs: Mapping[str, Json]) -> Iterator[tuple[str, str, str, float, float, float, str]]:
    """Yield each ratio of the overlaid side to stock.

    Yields:
        The run, and its row if it has several; the case; the figure; both medians; the ratio
        overlaid / stock; and its mark.
    """
    for name, run in runs.items():
        if run["kind"] == "engine":
            for row_name, row in run["rows"].items():
                for (label, case), figure in product(row["cases"].items(), FIGURES):
                    values = case["figures"].get(figure)
                    if values and (ratio := figures.ratio(case, figure, "overlaid")):
                        mark = figures.mark_of(values, "overlaid")
                        medians = values["stock"], values["overlaid"]
                        yield f"{name}, {row_name}", label, figure, *medians, ratio, mark
        elif {"figure", "overlaid / stock"} <= {*run["columns"]}:
            for row in run["rows"]:
                line = dict(zip(run["columns"], row, strict=True))
                cell = line["overlaid / stock"]
                ratio, mark = cell if isinstance(cell, list) else (cell, "")
                if isinstance(ratio, float):
                    medians = line["stock"], line["overlaid"]
                    yield name, line["case"], line["figure"], *medians, ratio, mark


def main(argv: Sequence[str]) -> int:
    """Write the page, or check it; 0 if it is then up to date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    args = parser.parse_args(argv)
    try:
        wanted = page(TEMPLATE.read_text(encoding="utf-8"), RUNS)
        if not args.check:
            replace(PAGE, wanted)
        current = PAGE.read_text(encoding="utf-8")
    except (Failure, OSError) as error:
        print(f"measurements: {error}", file=sys.stderr)
        return 1
    if current != wanted:
        print(f"measurements: {PAGE} is out of date; run bench.measurements", file=sys.stderr)
    return int(current != wanted)


if __name__ == "__main__":
    raise SystemExit(output.run("measurements", main))
