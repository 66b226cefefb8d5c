"""A run as Markdown. No ratio that the run refuses is shown; the reason is shown instead."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from bench.compare import manifest
from bench.compare.intervals import Interval
from bench.reports.claims import CLAIMED, MARKS, NOISE, Claims, disturbances
from bench.reports.figures import (
    REFUSED,
    UNSEEN_NOTE,
    WORDS,
    intervals,
    missing,
    number,
    others,
    ratio,
)
from bench.reports.run_file import Json
from bench.reports.verdict import verdicts

#: Above the intervals of a row.
SLICES = (
    "Steps a second beside stock's, by slices that the sides took by turns; the chance that any of "
    "a run's intervals misses is 5%:"
)
#: What a run of schema 1 cannot prove.
OLDER = (
    "it holds no raw figures of its children, no digests of outputs and prompts, no clocks, no "
    "disturbances and no manifest"
)
#: The variable that says which features and fixes the overlay has on.
SWITCH = "VLLM_READINESS"
#: Above a run that did not come to its end.
CUT_OFF = "**CUT OFF**: only what was measured until then."


def heading(run: Json) -> list[str]:
    """Return the machine, date and versions, the digests, the command and the environment."""
    machine = run["machine"]
    driver = f" (driver {machine['driver']})" if machine["driver"] else ""
    digests = [f"{side} {digest[:12]}" for side, digest in run["digests"].items()]
    lines = [
        f"{machine['device']}{driver}, {machine['cores']} cores of {machine['cpu']}, "
        f"{run['date']}, {_versions(run)}",
        f"Digests: {', '.join(digests)}." if digests else "",
        f"`{run['command']}`",
        environment(run),
        limited(run),
        f"An older run: {OLDER}." if run["kind"] == "engine" and run["schema"] == 1 else "",
    ]
    return [line for line in lines if line]


def environment(run: Json) -> str:
    """Return the variables that every child had; empty for a run that holds none."""
    settings = run.get("environment")
    if settings is None:
        return ""
    shown = [f"`{name}={value}`" for name, value in settings.items()]
    if run["kind"] == "engine" and SWITCH not in settings:
        shown.append(f"{SWITCH} was not set" if run["schema"] > 1 else f"{SWITCH} is not recorded")
    return f"Environment: {', '.join(shown)}."


def limited(run: Json) -> str:
    """Return what limited a run's rounds; empty if nothing was to."""
    limit = run.get("manifest", {}).get("limit")
    if limit is None:
        return ""
    return f"No round was begun that would have ended after {limit:,.0f} s."


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
    """Return the run: its verdict, a table for each row, and why ratios are missing."""
    lines = [part for line in heading(run) for part in (line, "")]
    lines[:0] = verdicts(run, Claims([run]))
    lines += table(run) if run["kind"] == "table" else _engine(run)
    return "\n".join(lines).rstrip() + "\n"


def _engine(run: Json) -> Iterator[str]:
    if not run["complete"]:
        yield from (CUT_OFF, "")
    for error in run["errors"]:
        first, _, log = error.partition("\n")
        yield from (f"FAILED: {first}", "", *(["````", log, "````", ""] if log else []))
    if run["complete"] and not run["errors"] and "manifest" in run:
        for text in manifest.differences(run):
            yield from (f"**NOT AS DECIDED**: {text}.", "")
    cells: list[str] = []
    claims, found = Claims([run]), intervals(run)
    for name, row in run["rows"].items():
        yield from row_table(name, row, cells, claims)
        yield from slice_lines(name, row, found)
        for label, case in row["cases"].items():
            owners = ""
            if any(any(rounds) for rounds in case["fences"].values()):
                sides = (f"{side}: {_fences(case, side, row['output'])}" for side in row["sides"])
                owners = f" Fences by owner: {'; '.join(sides)}."
            yield f"- {label}: {verdict(case, row['sides'])}.{owners}"
        yield from disturbances(row)
        yield ""
    yield from _notes(cells, claims)


def slice_lines(
    name: str, row: Json, found: Mapping[tuple[str, str, str], Interval]
) -> Iterator[str]:
    """Yield what the slices say of each case of a row, if they were taken by turns."""
    lines = []
    for label in row["cases"]:
        sides = [
            f"{side} {number(each.ratio, ratio=True)} ({number(each.low, ratio=True)} to "
            f"{number(each.high, ratio=True)})"
            for side in others(row["sides"])
            if (each := found.get((name, label, side)))
        ]
        lines += [f"- {label}: {', '.join(sides)}"] if sides else []
    if lines:
        yield from (SLICES, "", *lines, "")


def row_table(
    name: str,
    row: Json,
    shown: list[str],
    claims: Claims,
    figures: Container[str] | None = None,
) -> Iterator[str]:
    """Yield the lines of a row's title and table, and of its noise floor.

    Args:
        name: of the row.
        row: of an "engine" run.
        shown: is extended by the text of each cell.
        claims: of the page.
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
                ratios = [ratio_text(case, figure, side, claims) for side in against]
                rows.append([label, figure, *medians, *ratios])
    shown += [cell for cells in rows for cell in cells]
    head = ["case", "figure", *row["sides"], *(f"{side} / stock" for side in against)]
    source = f" ({row['source']})." if "source" in row else ""
    title = f"**{name}**: {row['title']}{source} {_shape(row)}; medians, times in ms"
    yield from (title, "", *pipes(head, rows, ["l", "l", *("r" for _ in head[2:])]), "")
    if (floor := claims.floor(row)) is not None:
        yield from (floor, "")


def ratio_text(case: Json, figure: str, side: str, claims: Claims) -> str:
    """Format a figure's ratio to stock with its mark: bold if better, in italics if worse."""
    value = ratio(case, figure, side)
    if value is None:
        return missing(case, figure, side)
    text = number(float(value), ratio=True)
    if mark := claims.mark(case, figure, side):
        return f"{text} {mark}"
    marks = {True: "**", False: "*", None: ""}[claims.better(case, figure, side)]
    return f"{marks}{text}{marks}"


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


def _notes(cells: Sequence[str], claims: Claims) -> list[str]:
    """Explain the marks in these cells, a paragraph each."""
    used = [
        note for mark, note in MARKS.items() if any(cell.endswith(f" {mark}") for cell in cells)
    ]
    if any(cell.startswith("*") for cell in cells):
        used.insert(0, CLAIMED.format(claims=claims.count))
    used += [note for text, note in WORDS.items() if text in cells]
    used += [UNSEEN_NOTE] if "-" in cells else []
    return [line for note in used for line in (note, "")]


def table(run: Json) -> list[str]:
    """Return the lines of a "table" run: title, table, notes, and refused ratios."""
    columns, align = run["columns"], run["align"]
    texts = [
        [number(cell, " / " in column) for cell, column in zip(row, columns, strict=True)]
        for row in run["rows"]
    ]
    notes = [
        *([run["note"]] if run.get("note") else []),
        *_table_notes(run, [c for row in texts for c in row]),
    ]
    refused = [f"- {REFUSED}: {problem}" for problem in run["problems"]]
    return [run["title"], "", *pipes(columns, texts, align), "", *notes, "", *refused]


def _table_notes(run: Json, cells: Sequence[str]) -> list[str]:
    """Explain the marks of a table, unless its own note does."""
    notes = []
    if any(cell.endswith(f" {NOISE}") for cell in cells) and NOISE not in run.get("note", ""):
        notes.append(f"{NOISE} marks a ratio whose rounds overlap: the difference may be noise.")
    return [*notes, *([UNSEEN_NOTE] if "-" in cells else [])]


def pipes(head: Sequence[str], rows: Iterable[Sequence[str]], align: Sequence[str]) -> list[str]:
    """Return the lines of a Markdown table; ``align`` holds "l" or "r" for each column."""
    marks = ["---:" if side == "r" else "---" for side in align]
    return [f"| {' | '.join(map(_cell, row))} |" for row in (head, marks, *rows)]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
