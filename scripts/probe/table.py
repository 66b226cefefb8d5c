"""The probe's records as a table of percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from overlay.output import escaped

from probe.records import OUTSIDE, PARTS, Process, percentile

PERCENTS = (50, 90, 99, 100)


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: what was measured.
        calls: how often.
        percentiles: p50, p90, p99 and the maximum, in milliseconds.
        total: the sum, in milliseconds.
        share: of the steps' sum; None: it is no part of it.
    """

    name: str
    calls: int
    percentiles: tuple[float, ...]
    total: float
    share: float | None


def rows(process: Process) -> list[Row]:
    """The table of one process.

    First the steps that continue requests, and the parts of which their time is made up;
    then those that only begin some, whose prompts take longer; then what lies within steps,
    or beside them: fences by owner, the readback, outputs.
    """
    every = process.steps()
    steps = [step for step in every if step.continuing]
    whole = sum(step.length for step in steps) / 1e6
    made = []
    if steps:
        made.append(_row("step", [step.length for step in steps], whole))
        names = [*PARTS, OUTSIDE]
        for name in names:
            lengths = [step.parts[name] for step in steps if name in step.parts]
            if lengths:
                made.append(_row(f"  {name}", lengths, whole))
    made += _some("step that only begins requests", [s.length for s in every if not s.continuing])
    inside = {name for step in steps for name in step.parts}
    for kind in PARTS:
        if kind not in inside:
            made += _some(kind, [span.length for span in process.of(kind)])
    fences = process.of("fence")
    for owner in sorted({span.owner for span in fences}):
        made += _some(f"fence: {owner}", [s.length for s in fences if s.owner == owner])
    copies = process.of("readback")
    made += _some("readback: started to ready", [span.length for span in copies])
    made += _some("readback: ready to consumed", [s.consumed - s.ended for s in copies])
    made += _some("between outputs", process.intervals())
    return made


def _some(name: str, lengths: Sequence[int]) -> list[Row]:
    return [_row(name, lengths, None)] if lengths else []


def _row(name: str, lengths: Sequence[int], whole: float | None) -> Row:
    total = sum(lengths) / 1e6
    values = tuple((percentile(lengths, percent) or 0) / 1e6 for percent in PERCENTS)
    return Row(name, len(lengths), values, total, total / whole if whole else None)


def text(processes: Iterable[Process]) -> str:
    """The tables for people."""
    lines: list[str] = []
    for process in processes:
        header = process.header
        overlay = header["overlay"]
        who = f"overlay {overlay}, digest {header['digest'][:12]}" if overlay else "pristine"
        lines += [
            f"{process.label} (pid {header['pid']}): vLLM {header['vllm']}, {who}, "
            f"{header['device']}",
        ]
        if header["lost"]:
            lines.append(f"  the oldest {header['lost']:,} records have given way to newer ones")
        found = rows(process)
        width = max([len(row.name) for row in found], default=0)
        head = ["count", "p50 ms", "p90 ms", "p99 ms", "max ms", "share"]
        lines.append(f"  {'':{width}}" + "".join(f"{name:>11}" for name in head))
        for row in found:
            shown = [f"{row.calls:,}", *(f"{value:,.3f}" for value in row.percentiles)]
            shown.append("" if row.share is None else f"{row.share:.1%}")
            cells = "".join(f"{value:>11}" for value in shown)
            lines.append(f"  {row.name:{width}}{cells}".rstrip())
        lines.append("")
    return "\n".join(map(escaped, lines))
