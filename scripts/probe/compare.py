"""Two recordings beside one another: what each part has of a step."""

from __future__ import annotations

from collections.abc import Sequence

from overlay.output import escaped

from probe.records import Process, percentile
from probe.table import Row, rows

_HEAD = ("p50 ms", "p99 ms", "ms a step")
_NOTE = (
    "Each is what its own traffic made of it: these are no shares of one another unless both sides "
    "served the same requests. `make bench-serving` sees to that."
)


def text(names: Sequence[str], one: Sequence[Process], other: Sequence[Process]) -> str:
    """Return a table for each process that both recordings have.

    Args:
        names: of the two recordings.
        one: the processes of the first.
        other: those of the second.
    """
    by_label = {process.label: process for process in other}
    lines: list[str] = []
    for process in one:
        if (beside := by_label.pop(process.label, None)) is None:
            lines += [f"{process.label}: {names[1]} has no such process", ""]
            continue
        lines += [*_table(names, process, beside), ""]
    lines += [f"{label}: {names[0]} has no such process" for label in by_label]
    return "\n".join(map(escaped, [*lines, _NOTE, ""]))


def _table(names: Sequence[str], one: Process, other: Process) -> list[str]:
    tables = [{row.name: row for row in rows(process)} for process in (one, other)]
    # Fences have owners on the overlay, and names of functions on stock: a row may be on one side.
    order = [*tables[0], *(name for name in tables[1] if name not in tables[0])]
    shown = [name for name in order if any(_of_steps(table.get(name)) for table in tables)]
    width = max([len(name) for name in shown], default=0)
    lines = [
        f"{one.label}: {name}: {_who(process)}, {_requests(process)}"
        for name, process in zip(names, (one, other), strict=True)
    ]
    lines.append(f"  {'':{width}}" + "".join(f"{head:>11}" * 2 for head in _HEAD) + f"{'ratio':>9}")
    for name in shown:
        pair = [table.get(name) for table in tables]
        cells = [*(_cell(row, place) for place in range(len(_HEAD)) for row in pair)]
        first, second = (row.per_step if row else None for row in pair)
        ratio = f"{second / first:.3f}" if first and second else ""
        cells_text = "".join(f"{cell:>11}" for cell in cells)
        lines.append(f"  {name:{width}}{cells_text}{ratio:>9}".rstrip())
    return lines


def _of_steps(row: Row | None) -> bool:
    return row is not None and row.per_step is not None


def _cell(row: Row | None, place: int) -> str:
    if row is None:
        return ""
    values = (row.percentiles[0], row.percentiles[2], row.per_step)
    value = values[place]
    return "" if value is None else f"{value:,.3f}"


def _who(process: Process) -> str:
    overlay = process.header["overlay"]
    return f"overlay {overlay}" if overlay else "pristine"


def _requests(process: Process) -> str:
    """How much was served: without it nobody can say what a difference means."""
    steps = [step for step in process.steps() if step.continuing]
    middle = percentile([step.continuing for step in steps], 50) or 0
    return f"{len(steps):,} steps that continue {middle:,.0f} requests (median)"
