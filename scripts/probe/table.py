"""The probe's records as a table of percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from overlay.output import escaped

from probe.records import OUTSIDE, PARTS, Process, Step, percentile

PERCENTS = (50, 90, 99, 100)


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: the kind of event.
        calls: number of events.
        percentiles: p50, p90, p99 and the maximum, in milliseconds.
        total: sum in milliseconds.
        share: fraction of the steps' sum; None if it is not a part of them.
        per_step: milliseconds in each step on average; None as for the share.
    """

    name: str
    calls: int
    percentiles: tuple[float, ...]
    total: float
    share: float | None
    per_step: float | None = None


def rows(process: Process) -> list[Row]:
    """Return the table of one process.

    First come the steps that continue requests, their parts, which add up to them, and in each
    part who waits in it; then those that only begin some, whose prompts take longer; then each
    fence by owner, of all threads, readbacks and outputs.
    """
    every = process.steps()
    steps = [step for step in every if step.continuing]
    first = [step.length for step in every if not step.continuing]
    table = []
    if steps:
        table.append(_part("step", [step.length for step in steps], steps))
        for name in (*PARTS, OUTSIDE):
            lengths = [step.parts[name] for step in steps if name in step.parts]
            if lengths:
                table.append(_part(f"  {name}", lengths, steps))
            owners = sorted({who for step in steps for part, who in step.waits if part == name})
            for owner in owners:
                waits = [step.waits[name, owner] for step in steps if (name, owner) in step.waits]
                table.append(_part(f"    waits: {owner}", waits, steps))
    table += _some("step that only begins requests", first)
    inside = {name for step in steps for name in step.parts}
    for kind in PARTS:
        if kind not in inside:
            table += _some(kind, [span.length for span in process.of(kind)])
    fences = process.of("fence")
    for owner in sorted({span.owner for span in fences}):
        table += _some(f"fence: {owner}", [s.length for s in fences if s.owner == owner])
    copies = process.of("readback")
    table += _some("readback: started to ready", [span.length for span in copies])
    table += _some("readback: ready to consumed", [s.consumed - s.ended for s in copies])
    table += _some("between outputs", process.intervals())
    return table


def _some(name: str, lengths: Sequence[int]) -> list[Row]:
    return [_row(name, lengths)] if lengths else []


def _part(name: str, lengths: Sequence[int], steps: Sequence[Step]) -> Row:
    """A row of something that is within these steps."""
    row = _row(name, lengths)
    whole = sum(step.length for step in steps) / 1e6
    return row._replace(share=row.total / whole if whole else None, per_step=row.total / len(steps))


def _row(name: str, lengths: Sequence[int]) -> Row:
    values = tuple((percentile(lengths, percent) or 0) / 1e6 for percent in PERCENTS)
    return Row(name, len(lengths), values, sum(lengths) / 1e6, None)


def text(processes: Iterable[Process]) -> str:
    """Return the tables as text."""
    lines: list[str] = []
    for process in processes:
        header = process.header
        overlay = header["overlay"]
        who = f"overlay {overlay}, digest {header['digest'][:12]}" if overlay else "pristine"
        versions = f"vLLM {header['vllm']}, {who}, {header['device']}"
        lines.append(f"{process.label} (pid {header['pid']}): {versions}")
        if header["lost"]:
            lines.append(f"  the oldest {header['lost']:,} records have given way to newer ones")
        table = rows(process)
        width = max([len(row.name) for row in table], default=0)
        head = ["count", "p50 ms", "p90 ms", "p99 ms", "max ms", "ms a step", "share"]
        lines.append(f"  {'':{width}}" + "".join(f"{name:>11}" for name in head))
        for row in table:
            shown = [f"{row.calls:,}", *(f"{value:,.3f}" for value in row.percentiles)]
            shown.append("" if row.per_step is None else f"{row.per_step:,.3f}")
            shown.append("" if row.share is None else f"{row.share:.1%}")
            cells = "".join(f"{value:>11}" for value in shown)
            lines.append(f"  {row.name:{width}}{cells}".rstrip())
        lines.append("")
    return "\n".join(map(escaped, lines))
