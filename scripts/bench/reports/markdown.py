"""A run as Markdown. No ratio that the run refuses is shown; the reason is shown instead."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence

from bench.reports.figures import MARKS, REFUSED, UNSEEN_NOTE, number, others, ratio_text
from bench.reports.run_file import Json

#: Above a run that did not come to its end.
CUT_OFF = "**CUT OFF**: only what was measured until then."


def heading(run: Json) -> list[str]:
    """Return the machine, date and versions, the digests, and the command, a line each."""
    machine = run["machine"]
    driver = f" (driver {machine['driver']})" if machine["driver"] else ""
    digests = [f"{side} {digest[:12]}" for side, digest in run["digests"].items()]
    lines = [
        f"{machine['device']}{driver}, {machine['cores']} cores of {machine['cpu']}, "
        f"{run['date']}, {_versions(run)}",
        f"Digests: {', '.join(digests)}." if digests else "",
        f"`{run['command']}`",
    ]
    return [line for line in lines if line]


def _versions(run: Json) -> str:
    names = {"vllm": "vLLM", "python": "Python"}
    return ", ".join(f"{names.get(key, key)} {v}" for key, v in run["versions"].items() if v)


def _shape(row: Json) -> str:
    """Describe the requests of a row, and an engine's schedule."""
    shape = row.get("shape") or (
        f"batch {row['batch']}, {row['prompt']:,}-token prompts, {row['output']:,} output tokens, "
        f"{row['scheduling']} scheduling"
    )
    rounds = row["rounds"]
    return f"{shape}, {'one round' if rounds == 1 else f'{rounds} rounds'}"


def verdict(case: Json, sides: Iterable[str]) -> str:
    """Return why sides of a case have no ratio, or that nothing is wrong."""
    problems = [f"{side}: {text}" for side in sides for text in case["problems"].get(side, [])]
    return "; ".join(problems) or "counts as expected, outputs identical"


def markdown(run: Json) -> str:
    """Return the run with a table for each row, and the reason for each refused ratio."""
    lines = [part for line in heading(run) for part in (line, "")]
    if settings := run.get("environment"):
        lines += [f"Environment: `{' '.join(f'{k}={v}' for k, v in settings.items())}`", ""]
    lines += table(run) if run["kind"] == "table" else _engine(run)
    return "\n".join(lines).rstrip() + "\n"


def _engine(run: Json) -> Iterator[str]:
    if not run["complete"]:
        yield from (CUT_OFF, "")
    for error in run["errors"]:
        first, _, log = error.partition("\n")
        yield from (f"FAILED: {first}", "", *(["````", log, "````", ""] if log else []))
    cells: list[str] = []
    for name, row in run["rows"].items():
        yield from row_table(name, row, cells)
        for label, case in row["cases"].items():
            owners = ""
            if any(any(rounds) for rounds in case["fences"].values()):
                sides = (f"{side}: {_fences(case, side, row['output'])}" for side in row["sides"])
                owners = f" Fences by owner: {'; '.join(sides)}."
            yield f"- {label}: {verdict(case, row['sides'])}.{owners}"
        yield ""
    yield from _notes(cells)


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
    source = f" ({row['source']})." if "source" in row else ""
    title = f"**{name}**: {row['title']}{source} {_shape(row)}; medians, times in ms"
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


def _notes(cells: Sequence[str]) -> list[str]:
    """Explain the marks in these cells."""
    used = [
        note for mark, note in MARKS.items() if any(cell.endswith(f" {mark}") for cell in cells)
    ]
    return used + ([UNSEEN_NOTE] if "-" in cells else [])


def table(run: Json) -> list[str]:
    """Return the lines of a "table" run: title, table, notes, and refused ratios."""
    columns, align = run["columns"], run["align"]
    texts = [
        [number(cell, " / " in column) for cell, column in zip(row, columns, strict=True)]
        for row in run["rows"]
    ]
    notes = [
        *([run["note"]] if run.get("note") else []),
        *_notes([c for row in texts for c in row]),
    ]
    refused = [f"- {REFUSED}: {problem}" for problem in run["problems"]]
    return [run["title"], "", *pipes(columns, texts, align), "", *notes, "", *refused]


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; ``align`` holds "l" or "r" for each column."""
    marks = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
