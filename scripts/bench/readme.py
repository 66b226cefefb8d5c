"""The README's measured figures, made from the runs that are committed.

    python scripts/bench/readme.py [--check]

A block of the README is

    <!-- run: NAME [ROW...] [; cases: CASE | CASE] [; figures: FIGURE | FIGURE] -->
    ...
    <!-- /run -->

and what stands between is made from scripts/bench/runs/NAME.json: of a benchmark of the
engine these rows, cases and figures (all rows, all cases, and :data:`FIGURES`), of a table all
of it. --check changes nothing, and fails at the first block that differs.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

from bench import report  # noqa: E402
from bench.report import Found  # noqa: E402
from bench.sides import Failure  # noqa: E402
from overlay import output  # noqa: E402

README = ROOT / "README.md"
RUNS = ROOT / "scripts" / "bench" / "runs"
#: What a block shows of each case, if it does not say.
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
_OPEN = re.compile(r"<!-- run:(.*?)-->\n", re.DOTALL)
_CLOSE = "<!-- /run -->"


@dataclass(frozen=True)
class Block:
    """A block of the README.

    Attributes:
        run: the run's name.
        rows: of the engine's benchmark; all if empty.
        cases: of each row; all if empty.
        figures: of each case; :data:`FIGURES`, as far as a row has them, if empty.
        start: where its text begins, behind the opening mark's line.
        end: where its text ends, and the closing mark begins.
        line: the line of the opening mark, from 1.
    """

    run: str
    rows: Sequence[str]
    cases: Sequence[str]
    figures: Sequence[str]
    start: int
    end: int
    line: int


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a README, in their order.

    Raises:
        Failure: a block is not closed, not opened, or says something else than above.
    """
    at = 0
    while found := _OPEN.search(text, at):
        line = text.count("\n", 0, found.start()) + 1
        end = text.find(_CLOSE, found.end())
        if end < 0 or _OPEN.search(text, found.end(), end):
            raise Failure(f"README line {line}: the block is not closed by {_CLOSE}")
        if _CLOSE in text[at : found.start()]:
            raise Failure(f"README, before line {line}: {_CLOSE} closes nothing")
        first, *rest = (part.strip() for part in found[1].split(";"))
        words = first.split()
        options = {key.strip(): value for key, _, value in (part.partition(":") for part in rest)}
        if not words or not options.keys() <= {"cases", "figures"}:
            raise Failure(f"README line {line}: a block names a run, rows, cases and figures")
        chosen = {
            key: [each.strip() for each in options.get(key, "").split("|") if each.strip()]
            for key in ("cases", "figures")
        }
        yield Block(words[0], words[1:], **chosen, start=found.end(), end=end, line=line)
        at = end + len(_CLOSE)
    if _CLOSE in text[at:]:
        raise Failure(f"README, behind the last block: {_CLOSE} closes nothing")


def outside(text: str) -> Iterator[tuple[int, str]]:
    """The README's lines outside of its blocks, with their numbers."""
    inside = [(text.count("\n", 0, b.start), text.count("\n", 0, b.end)) for b in blocks(text)]
    for number, line in enumerate(text.splitlines()):
        if not any(start <= number < end for start, end in inside):
            yield number + 1, line


def generated(block: Block, folder: Path) -> str:
    """What stands in a block.

    Raises:
        Failure: the run is missing, or has no such row, case or figure.
    """
    where = f"README line {block.line}"
    file = folder / f"{block.run}.json"
    if not file.is_file():
        raise Failure(f"{where}: there is no run {file}; measure it, or name another")
    run = report.load(file)
    lines = [*report.heading(run), ""]
    if run["kind"] == "table":
        if block.rows or block.cases or block.figures:
            raise Failure(f"{where}: {block.run} is a table, and is shown whole")
        lines += [f"{run['title']}:", "", *report.table(run)]
        lines += ["", *report.table_notes(run)]
        lines += ["", *(f"- {report.REFUSED}: {problem}" for problem in run["problems"])]
    else:
        if not run["complete"]:
            lines += [report.CUT_OFF, ""]
        cells: list[str] = []
        for name in block.rows or run["rows"]:
            row = _named(run["rows"], name, f"{where}: {block.run} has no row")
            made = [_line(row, *at) for at in _shown(row, block, where)]
            cells += [cell for line in made for cell in line]
            against = report.others(row["sides"])
            head = ["case", "figure", *row["sides"], *(f"{side} / stock" for side in against)]
            lines += [
                f"**{name}**: {row['title']} ({row['source']}). {report.shape(row)}; medians, "
                "times in ms:",
                "",
                *report.pipes(head, made, ["l", "l", *("r" for _ in head[2:])]),
                "",
                *_refusals(row, block.cases or row["cases"]),
            ]
        lines += report.notes(cells)
        lines += [f"FAILED: {error.partition(chr(10))[0]}" for error in run["errors"]]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _shown(row: Found, block: Block, where: str) -> Iterator[tuple[str, str]]:
    """The cases and figures that a block shows of a row, each pair a line."""
    for case in block.cases or row["cases"]:
        found = _named(row["cases"], case, f"{where}: {block.run} has no case")["figures"]
        for figure in block.figures or FIGURES:
            if block.figures:
                _named(found, figure, f"{where}: {block.run} has no figure")
            if figure in found and any(
                found[figure].get(side) is not None for side in row["sides"]
            ):
                yield case, figure


def _line(row: Found, label: str, figure: str) -> list[str]:
    case = row["cases"][label]
    values = [report.number(case["figures"][figure].get(side)) for side in row["sides"]]
    ratios = [report.ratio_text(case, figure, side) for side in report.others(row["sides"])]
    return [label, figure, *values, *ratios]


def _refusals(row: Found, cases: Iterable[str]) -> Iterator[str]:
    for label in cases:
        case = row["cases"][label]
        if any(case["problems"].get(side) for side in row["sides"]):
            yield f"- {label}: {report.verdict(case, row['sides'])}."
    yield ""


def _named(found: Found, name: str, otherwise: str) -> Found:
    if name not in found:
        raise Failure(f"{otherwise} {name!r}; it has {', '.join(found)}")
    value: Found = found[name]
    return value


def rewritten(text: str, folder: Path) -> str:
    """A README with what its blocks should hold.

    Raises:
        Failure: see :func:`blocks` and :func:`generated`.
    """
    for block in reversed(list(blocks(text))):
        text = text[: block.start] + generated(block, folder) + text[block.end :]
    return text


def stale(text: str, folder: Path) -> str | None:
    """The first block that differs from its run, and where; None if there is none.

    Raises:
        Failure: see :func:`blocks` and :func:`generated`.
    """
    for block in blocks(text):
        wanted = generated(block, folder).splitlines()
        there = text[block.start : block.end].splitlines()
        if wanted != there:
            at = next(
                (
                    n
                    for n, (one, other) in enumerate(zip(wanted, there, strict=False))
                    if one != other
                ),
                min(len(wanted), len(there)),
            )
            said = wanted[at] if at < len(wanted) else "nothing more"
            number = text.count("\n", 0, block.start) + 1 + at
            return f"README line {number} differs from the run {block.run}, which has: {said}"
    return None


def main(argv: Sequence[str]) -> int:
    """Rewrite the README, or check it; 0 if it is then what the runs make it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail at a difference")
    parser.add_argument("--readme", type=Path, default=README, help="(%(default)s)")
    parser.add_argument("--runs", type=Path, default=RUNS, help="directory (%(default)s)")
    args = parser.parse_args(argv)
    try:
        text = args.readme.read_text(encoding="utf-8")
        if not args.check:
            made = rewritten(text, args.runs)
            if made != text:
                args.readme.write_text(made, encoding="utf-8")
        elif found := stale(text, args.runs):
            print(f"readme: {found}; run python scripts/bench/readme.py", file=sys.stderr)
            return 1
    except (Failure, OSError) as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("readme", main))
