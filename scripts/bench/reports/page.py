"""A run as one HTML page: the values that its template shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.errors import Failure
from bench.reports import charts, figures, markdown
from bench.reports.run_file import Json

TEMPLATE = "page.html.j2"
#: What the summary at the top shows of each case.
SUMMARY = (
    *("tokens/s", "ITL p50", "ITL p99"),
    *("sample_tokens p99", "get_output p99", "fences, a step"),
)
#: A ratio this close to 1 is neither better nor worse.
EVEN = 0.03


def page(run: Json) -> str:
    """Return the run as one HTML page, which needs no other file and no network.

    Raises:
        Failure: jinja2 is not installed.
    """
    try:
        import pages
    except ImportError as error:
        raise Failure(
            f"the page needs jinja2 ({error}); make it with `make tools`'s Python: "
            "PYTHONPATH=scripts build/env/bin/python -m bench.report RUN.json --html FILE"
        ) from error
    machine, versions = run["machine"], run["versions"]
    view = {
        "run": run,
        "title": f"vLLM {versions['vllm'] or 'unknown'} on {machine['device']}, {run['date']}",
        "released": markdown.released(versions),
        "took": _duration(run["seconds"]),
        "embedded": embedded(run),
        **(_table(run) if run["kind"] == "table" else _engine(run)),
    }
    return pages.environment(Path(__file__).parent).get_template(TEMPLATE).render(view)


def embedded(run: Json) -> str:
    """Return the run's JSON, escaped so that no text in it ends its script element."""
    text = json.dumps(run, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _table(run: Json) -> dict[str, Any]:
    rows = [
        [
            {"text": text, "value": json.dumps(value), "column": column, "align": align}
            for text, value, column, align in zip(
                texts, values, run["columns"], run["align"], strict=True
            )
        ]
        for texts, values in zip(markdown.table_cells(run), run["rows"], strict=True)
    ]
    return {"heading": "A micro-benchmark", "lines": rows, "notes": markdown.table_notes(run)}


def _engine(run: Json) -> dict[str, Any]:
    rows = [_row(name, row, f"row-{n}") for n, (name, row) in enumerate(run["rows"].items())]
    cells = [
        cell["text"]
        for row in rows
        for case in row["cases"]
        for line in case["lines"]
        for cell in line[1:]
    ]
    refusals = list(_refusals(run))
    return {
        "heading": "Where each step’s time goes",
        "summary": SUMMARY,
        "rows": rows,
        # Model Runner V2 computes in another order, so its outputs usually differ.
        "refusals": [refusal for refusal in refusals if refusal[2] != "mrv2"],
        "mrv2_refusals": [refusal for refusal in refusals if refusal[2] == "mrv2"],
        "notes": markdown.notes(cells),
    }


def _refusals(run: Json) -> Iterator[tuple[str, str, str, str]]:
    """Yield row, case, side and problem of everything that refuses a ratio."""
    for name, row in run["rows"].items():
        for label, case in row["cases"].items():
            for side, problems in case["problems"].items():
                for problem in problems:
                    yield name, label, side, problem


def _row(name: str, row: Json, anchor: str) -> dict[str, Any]:
    sides, against = row["sides"], figures.others(row["sides"])
    cases = [
        {
            "label": label,
            "problems": [(side, text) for side in sides for text in case["problems"].get(side, [])],
            "lines": [
                [figure, *_cells(case, figure, sides, against)] for figure in case["figures"]
            ],
            "summary": [_summary(case, side) for side in against],
            "chart": charts.step_time(case["series"]),
        }
        for label, case in row["cases"].items()
    ]
    return {
        "name": name,
        "anchor": anchor,
        "row": row,
        "shape": markdown.shape(row),
        "model": row["model"] if isinstance(row["model"], str) else json.dumps(row["model"]),
        "against": against,
        "waits": charts.waits(row["cases"], sides),
        "cases": cases,
    }


def _cells(
    case: Json, figure: str, sides: Sequence[str], against: Sequence[str]
) -> list[dict[str, Any]]:
    values = case["figures"][figure]
    cells: list[dict[str, Any]] = []
    for side in sides:
        value = values.get(side)
        seen = [float(one) for one in values["rounds"].get(side, []) if one is not None]
        ends = [figures.number(end) for end in (min(seen), max(seen))] if seen else []
        cells.append(
            {
                "side": side,
                "value": json.dumps(value),
                "text": figures.number(None if value is None else float(value)),
                "range": " to ".join(ends) if len(set(ends)) > 1 else "",
            }
        )
    return cells + [_ratio(case, figure, side) for side in against]


def _ratio(case: Json, figure: str, side: str) -> dict[str, Any]:
    value = figures.ratio(case, figure, side)
    mark = figures.mark_of(case["figures"][figure], side)
    better = value is not None and (value > 1) == (figure == "tokens/s")
    certain = value is not None and not mark and abs(value - 1) >= EVEN
    return {
        "ratio": side,
        "value": json.dumps(value),
        "text": figures.ratio_text(case, figure, side),
        "verdict": ("better" if better else "worse") if certain else "",
    }


def _summary(case: Json, side: str) -> dict[str, Any]:
    """Return a line of the summary: a side's ratios to stock, and its fences."""
    cells = []
    for figure in SUMMARY:
        if figure not in case["figures"]:
            cells.append({"text": "-", "verdict": ""})
        elif figure.startswith("fences"):
            text = figures.number(case["figures"][figure].get(side))
            cells.append({"text": text, "verdict": ""})
        else:
            cells.append(_ratio(case, figure, side))
    return {"side": side, "cells": cells}
