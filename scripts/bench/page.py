"""What the page of a run shows, made ready for its template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pages
from bench import plots, report
from bench.report import Found
from markupsafe import Markup

TEMPLATE = "page.html.j2"
#: A ratio this close to 1 is neither better nor worse.
EVEN = 0.03


def render(run: Found) -> str:
    """The run as one HTML page."""
    environment = pages.environment(Path(__file__).parent)
    machine, versions = run["machine"], run["versions"]
    view = {
        "run": run,
        "title": f"vLLM {versions['vllm'] or 'unknown'} on {machine['device']}, {run['date']}",
        "released": report.released(versions),
        "took": _took(run["seconds"]),
        "embedded": embedded(run),
        **(_table(run) if run["kind"] == "table" else _engine(run)),
    }
    return environment.get_template(TEMPLATE).render(view)


def embedded(run: Found) -> Markup:
    """The run's JSON, which no text in it can lead out of its script element."""
    text = json.dumps(run, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 (escaped above)


def _took(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _table(run: Found) -> dict[str, Any]:
    cells = [
        [
            {
                "text": report.number(value, " / " in column),
                "value": json.dumps(value),
                "column": column,
                "align": align,
                "refused": value == report.REFUSED,
            }
            for value, column, align in zip(row, run["columns"], run["align"], strict=True)
        ]
        for row in run["rows"]
    ]
    return {"heading": "A micro-benchmark", "lines": cells, "notes": report.table_notes(run)}


def _engine(run: Found) -> dict[str, Any]:
    numbers = count(1)
    rows = [
        _row(name, row, f"row-{at}", numbers) for at, (name, row) in enumerate(run["rows"].items())
    ]
    cells = [
        cell for row in rows for case in row["cases"] for line in case["lines"] for cell in line[1:]
    ]
    return {
        "heading": "Where each step’s time goes",
        "summary": report.SUMMARY,
        "rows": rows,
        # Model Runner V2 computes in another order: that it differs is the rule.
        "refusals": [each for each in report.refusals(run) if each[2] != "mrv2"],
        "others": [each for each in report.refusals(run) if each[2] == "mrv2"],
        "notes": report.notes([cell["text"] for cell in cells]),
    }


def _row(name: str, row: Found, anchor: str, numbers: Iterator[int]) -> dict[str, Any]:
    sides, against = row["sides"], report.others(row["sides"])
    waits = plots.waits(
        row["cases"], sides, f"{name}: where the host waits in a step", f"p{next(numbers)}"
    )
    cases = []
    for label, case in row["cases"].items():
        lines = [[figure, *_cells(case, figure, sides, against)] for figure in case["figures"]]
        step_time = plots.step_time(
            case["series"],
            f"{name}, {label}: step time against output length",
            f"p{next(numbers)}",
        )
        timeline = plots.timeline(
            case["timeline"], f"{name}, {label}: timeline of three steps", f"p{next(numbers)}"
        )
        cases.append(
            {
                "label": label,
                "parameters": json.dumps(case["parameters"]),
                "problems": [
                    (side, text) for side in sides for text in case["problems"].get(side, [])
                ],
                "lines": lines,
                "summary": [_summary(case, side) for side in against],
                "counts": list(_counts(case, row)),
                "step_time": _svg(step_time),
                "ends": _ends(case["series"]),
                "timeline": _svg(timeline),
                "spans": [
                    {"side": side, **span, "length": report.number(float(plots.length(span)))}
                    for side, spans in case["timeline"].items()
                    for span in spans
                ],
            }
        )
    return {
        "name": name,
        "anchor": anchor,
        "row": row,
        "shape": report.shape(row),
        "model": row["model"] if isinstance(row["model"], str) else json.dumps(row["model"]),
        "against": against,
        "waits": _svg(waits),
        "cases": cases,
    }


def _cells(
    case: Found, figure: str, sides: Sequence[str], against: Sequence[str]
) -> list[dict[str, Any]]:
    values = case["figures"][figure]
    cells: list[dict[str, Any]] = []
    for side in sides:
        value = values.get(side)
        seen = [each for each in values["rounds"].get(side, []) if each is not None]
        ends = [report.number(float(each)) for each in (min(seen), max(seen))] if seen else []
        cells.append(
            {
                "side": side,
                "value": json.dumps(value),
                "text": report.number(_float(value)),
                "range": " to ".join(ends) if len(set(ends)) > 1 else "",
            }
        )
    return cells + [_ratio(case, figure, side) for side in against]


def _ratio(case: Found, figure: str, side: str) -> dict[str, Any]:
    value = report.ratio(case, figure, side)
    return {
        "ratio": side,
        "value": json.dumps(value),
        "text": report.ratio_text(case, figure, side),
        "verdict": _verdict(figure, value, report.doubt(case["figures"][figure], side)),
    }


def _verdict(figure: str, value: float | None, mark: str) -> str:
    """What a ratio to stock is: better, worse, or nothing."""
    if value is None or mark or abs(value - 1) < EVEN:
        return ""
    return "better" if (value > 1) == (figure == "tokens/s") else "worse"


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def _summary(case: Found, side: str) -> dict[str, Any]:
    """A line of the page's summary: a side's ratios to stock, and its fences."""
    cells = []
    for figure in report.SUMMARY:
        if figure not in case["figures"]:
            cells.append({"text": "-", "verdict": ""})
        elif figure.startswith("fences"):
            cells.append({"text": report.number(case["figures"][figure].get(side)), "verdict": ""})
        else:
            cells.append(_ratio(case, figure, side))
    return {"side": side, "cells": cells, "refused": bool(report.reasons(case, side))}


def _counts(case: Found, row: Found) -> Iterator[dict[str, Any]]:
    """What came and what should have, and the fences by owner, by side and round."""
    for side in row["sides"]:
        fences = case["fences"].get(side, [])
        for turn, counts in enumerate(case["counts"].get(side, [])):
            owners = fences[turn] if turn < len(fences) else {}
            yield {
                "side": side,
                "round": row["compared"][turn] if "compared" in row else turn + 1,
                "counts": [
                    {"kind": kind, "received": f"{n:,}", "expected": f"{m:,}", "lost": n != m}
                    for kind, (n, m) in counts.items()
                ],
                "fences": ", ".join(f"{owner} {n:,}" for owner, n in owners.items()) or "none",
            }


def _ends(series: Found) -> list[dict[str, Any]]:
    """Where each side's step time begins and ends."""
    ends = []
    for side, found in series.items():
        if line := plots.points(found):
            text = " → ".join(report.number(float(line[at][1])) for at in (0, -1)) + " ms"
            ends.append({"side": side, "text": text, "from": line[0][0], "to": line[-1][0]})
    return ends


def _svg(text: str | None) -> Markup | None:
    return None if text is None else Markup(text)  # noqa: S704 (matplotlib's, names escaped)
