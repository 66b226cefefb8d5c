"""A run as Markdown. No ratio that the run refuses is shown; the reason is shown instead."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path

from bench.reports.figures import MARKS, REFUSED, UNSEEN_NOTE, number, others, ratio_text
from bench.reports.run_file import Json, replace

#: Above a run that did not come to its end.
CUT_OFF = "**CUT OFF**: only what was measured until then."


def heading(run: Json) -> list[str]:
    """Return the machine, date and versions, the digests, and the command, a line each."""
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


def released(versions: Json) -> str:
    """Return the versions in a line."""
    names = {"vllm": "vLLM", "python": "Python"}
    return ", ".join(f"{names.get(key, key)} {v}" for key, v in versions.items() if v)


def shape(row: Json) -> str:
    """Describe the engine and the requests of a row."""
    rounds = row["rounds"]
    return (
        f"batch {row['batch']}, {row['prompt']:,}-token prompts, {row['output']:,} output tokens, "
        f"{row['scheduling']} scheduling, {'one round' if rounds == 1 else f'{rounds} rounds'}"
    )


def verdict(case: Json, sides: Iterable[str]) -> str:
    """Return why sides of a case have no ratio, or that nothing is wrong."""
    problems = [f"{side}: {text}" for side in sides for text in case["problems"].get(side, [])]
    return "; ".join(problems) or "counts as expected, outputs identical"


def markdown(run: Json) -> str:
    """Return the run with a table for each row, and the reason for each refused ratio."""
    lines = [part for line in heading(run) for part in (line, "")]
    lines += table(run) if run["kind"] == "table" else _engine(run)
    return "\n".join(lines).rstrip() + "\n"


def _engine(run: Json) -> Iterator[str]:
    if not run["complete"]:
        yield from (CUT_OFF, "")
    for error in run["errors"]:
        first, _, rest = error.partition("\n")
        yield from (f"FAILED: {first}", "", *(["````", rest, "````", ""] if rest else []))
    cells: list[str] = []
    for name, row in run["rows"].items():
        yield from row_table(name, row, cells)
        for label, case in row["cases"].items():
            fences = "; ".join(
                f"{side}: {_fences(case, side, row['output'])}" for side in row["sides"]
            )
            yield f"- {label}: {verdict(case, row['sides'])}. Fences by owner: {fences}."
        yield ""
    yield from notes(cells)


def row_table(
    name: str, row: Json, shown: list[str], figures: Container[str] | None = None
) -> Iterator[str]:
    """Yield the lines of a row's title and table.

    Args:
        name: of the row.
        row: of an "engine" run.
        shown: is extended by the text of each cell.
        figures: those to show, where a side has them; None for all.
    """
    against = others(row["sides"])
    rows = []
    for label, case in row["cases"].items():
        for figure, values in case["figures"].items():
            if figures is None or (
                figure in figures and any(values.get(side) is not None for side in row["sides"])
            ):
                medians = [number(values.get(side)) for side in row["sides"]]
                ratios = [ratio_text(case, figure, side) for side in against]
                rows.append([label, figure, *medians, *ratios])
    shown += [cell for cells in rows for cell in cells]
    head = ["case", "figure", *row["sides"], *(f"{side} / stock" for side in against)]
    title = f"**{name}**: {row['title']} ({row['source']}). {shape(row)}; medians, times in ms"
    yield from (title, "", *pipes(head, rows, ["l", "l", *("r" for _ in head[2:])]), "")


def _fences(case: Json, side: str, steps: int) -> str:
    """Return the most fences of each owner in a round, and in a thousand of its steps."""
    rounds = case["fences"].get(side) or []
    if not any(rounds):
        return "none counted"
    owners = sorted({owner for counts in rounds for owner in counts})
    most = {owner: max(counts.get(owner, 0) for counts in rounds) for owner in owners}
    return ", ".join(
        f"{owner} {n:,} ({number(n / steps * 1e3)} a thousand steps)" for owner, n in most.items()
    )


def notes(cells: Sequence[str]) -> list[str]:
    """Explain the marks in these cells."""
    used = [
        note for mark, note in MARKS.items() if any(cell.endswith(f" {mark}") for cell in cells)
    ]
    return used + ([UNSEEN_NOTE] if "-" in cells else [])


def table(run: Json) -> list[str]:
    """Return the lines of a "table" run: title, table, notes, and refused ratios."""
    refused = [f"- {REFUSED}: {problem}" for problem in run["problems"]]
    rows = pipes(run["columns"], table_cells(run), run["align"])
    return [run["title"], "", *rows, "", *table_notes(run), "", *refused]


def table_cells(run: Json) -> list[list[str]]:
    """Return the texts of a "table" run's cells."""
    return [
        [number(cell, " / " in column) for cell, column in zip(row, run["columns"], strict=True)]
        for row in run["rows"]
    ]


def table_notes(run: Json) -> list[str]:
    """Return the notes below a "table" run's table."""
    cells = [cell for row in table_cells(run) for cell in row]
    return [*([run["note"]] if run.get("note") else []), *notes(cells)]


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; ``align`` holds "l" or "r" for each column."""
    marks = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def publish(run: Json, file: Path | None) -> int:
    """Print a "table" run, and write it where asked; 1 if a problem refuses a ratio, else 0."""
    print(markdown(run), end="")
    if file:
        replace(file, json.dumps(run, indent=1) + "\n")
    return 1 if run["problems"] else 0
