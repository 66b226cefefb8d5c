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
from bench.compare import manifest
from bench.compare.installations import ROOT
from bench.compare.machine import overlay_version
from bench.errors import Failure
from bench.reports import figures, markdown
from bench.reports.claims import FEW, Claims, decides, disturbances, more_is_better
from bench.reports.run_file import Json, load, replace
from bench.reports.verdict import verdicts
from bench.reports.verify import edited
from bench.servers import results

TEMPLATE = ROOT / "scripts" / "bench" / "measurements.md"
RUNS = ROOT / "scripts" / "bench" / "runs"
PAGE = ROOT / "docs" / "measurements.md"
#: The figures that are published of each case.
FIGURES = dict.fromkeys(
    (
        *("tokens/s", "ITL p50", "ITL p99", "ITL max", "execute_model p50"),
        *("sample_tokens p50", "sample_tokens p99"),
        *("get_output p50", "get_output p99"),
        *("sample_tokens + get_output p50", "waiting in both, ms a step", "fences, a step"),
        *(*results.FIGURES, *step.FIGURES.values()),
    )
)
#: Figures of which two runs of one row are compared.
DECIDING = ("tokens/s", "ITL p50", "ITL p99")
#: Rows of fewer rounds are not published.
FEWEST = 3
#: Differences below this that may be noise are not listed as slower.
EVEN = 0.03
#: Below a table, whose ratios hold no rounds.
UNPROVEN = "This table holds no rounds: its ratios are no claims."
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
    claims = Claims(runs.values(), FIGURES)

    def replaced(mark: re.Match[str]) -> str:
        lines = tables(mark[2], runs, claims) if mark[2] else slower(runs, claims)
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
    few = [row for row in rows if row["rounds"] < FEWEST]
    if not run.get("complete", True) or run.get("errors"):
        raise Failure(f"{file} was cut off, or failed in part; measure it again or delete it")
    if few:
        raise Failure(f"{file} has rows of fewer than {FEWEST} rounds; measure them again")
    if found := edited(run):
        raise Failure(f"{file} was edited: {'; '.join(found)}")
    if run["kind"] == "engine" and run["schema"] > 1:
        if found := [*manifest.differences(run)]:
            raise Failure(f"{file} is not what its manifest decided: {'; '.join(found)}")
        if (reason := manifest.uncommitted(run)) is not None:
            raise Failure(f"{file} cannot be repeated: {reason}; commit, and measure again")
    return run


def tables(name: str, runs: Mapping[str, Json], claims: Claims) -> Iterator[str]:
    """Yield the lines that describe a run of the page, and its tables."""
    run = runs[name]
    yield from verdicts(run, claims)
    for line in markdown.heading(run):
        yield from (line, "")
    measured, current = run["versions"]["overlay"], overlay_version()
    if measured != current:
        yield from (f"This is a run of overlay {measured}; the current one is {current}.", "")
    if run["kind"] == "table":
        yield from (*markdown.table(run), "")
        yield from () if run.get("rounds") else (UNPROVEN, "")
        return
    found = figures.intervals(run)
    for row_name, row in run["rows"].items():
        yield from markdown.row_table(row_name, row, [], claims, FIGURES)
        yield from markdown.slice_lines(row_name, row, found)
        refused: dict[str, list[str]] = {}
        for label, case in row["cases"].items():
            if any(case["problems"].values()):
                refused.setdefault(markdown.verdict(case, row["sides"]), []).append(label)
        yield from (f"- {'; '.join(labels)}: {why}." for why, labels in refused.items())
        yield from disturbances(row)
        yield from otherwise(run, row_name, runs)
        yield ""


def otherwise(run: Json, row: str, runs: Mapping[str, Json]) -> Iterator[str]:
    """Yield a line for each figure of which another run of the row on such a device says otherwise.

    Args:
        run: that is shown.
        row: the name of one of its rows.
        runs: those of the page; newer ones are left out.
    """
    for name, other in runs.items():
        if other is run or other["kind"] != "engine" or row not in other["rows"]:
            continue
        alike = run["machine"]["device"] == other["machine"]["device"]
        if not alike or other["date"] > run["date"]:
            continue
        for label, case in run["rows"][row]["cases"].items():
            before = other["rows"][row]["cases"].get(label, {"figures": {}})
            both = case["figures"].keys() & before["figures"].keys()
            for figure in (each for each in DECIDING if each in both):
                ratios = [figures.ratio(one, figure, "overlaid") for one in (case, before)]
                here, there = (ratio or 1.0 for ratio in ratios)
                if (here - 1) * (there - 1) < 0 and abs(here - there) > EVEN:
                    shown = figures.number(there, ratio=True), figures.number(here, ratio=True)
                    yield (
                        f"- {label}: the run {name} of {other['date']} says otherwise of {figure}: "
                        f"{shown[0]}, and not {shown[1]}."
                    )


def slower(runs: Mapping[str, Json], claims: Claims) -> list[str]:
    """Return the lines of the table of figures that are worse than stock's, worst first."""
    worse: list[tuple[float, list[str]]] = []
    for *names, stock, overlaid, ratio, mark in _ratios(runs, claims):
        loss = 1 / ratio if more_is_better(names[-1]) else ratio
        if decides(names[-1]) and loss > 1 + EVEN * bool(mark):
            shown = figures.number((ratio, mark) if mark else ratio, ratio=True)
            worse.append((loss, [*names, figures.number(stock), figures.number(overlaid), shown]))
    worse.sort(key=lambda line: line[0], reverse=True)
    head = ["run", "case", "figure", "stock", "overlaid", "overlaid / stock"]
    return markdown.pipes(head, [cells for _, cells in worse], ["l", "l", "l", "r", "r", "r"])


def _ratios(
    runs: Mapping[str, Json], claims: Claims
) -> Iterator[tuple[str, str, str, float, float, float, str]]:
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
                        mark = claims.mark(case, figure, "overlaid")
                        medians = values["stock"], values["overlaid"]
                        yield f"{name}, {row_name}", label, figure, *medians, ratio, mark
        elif {"figure", "overlaid / stock"} <= {*run["columns"]}:
            for row in run["rows"]:
                line = dict(zip(run["columns"], row, strict=True))
                cell = line["overlaid / stock"]
                # Without rounds, nothing tells a ratio from noise.
                unmarked = "" if run.get("rounds") else FEW
                ratio, mark = cell if isinstance(cell, list) else (cell, unmarked)
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
