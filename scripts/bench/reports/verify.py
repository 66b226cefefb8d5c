"""Check that a run says what its children returned: nothing was edited, as far as can be seen."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from demo import model

from bench import fixes, host, logprobs, thinking
from bench.compare import clock
from bench.compare.raw import restored
from bench.compare.summary import summarise
from bench.engines import prompts
from bench.engines.prompts import Place
from bench.engines.rows import BASELINE
from bench.reports.figures import reasons
from bench.reports.markdown import OLDER
from bench.reports.run_file import Json

_TABLE = "this table holds no rounds in a form that can be checked"
#: The columns of a table to the function that makes its rows of the values of its rounds.
_ROWS: Mapping[tuple[str, ...], Callable[[Sequence[Json]], Sequence[Any]]] = {
    tuple(host.HostRun.columns): host.rows,
    tuple(fixes.FixesRun.columns): fixes.rows,
    tuple(logprobs.LogprobsRun.columns): logprobs.rows,
}
_NEVER = (
    "whether the machine was what the run says, and whether somebody changed the children's "
    "figures all alike, no file can prove"
)


def unproven(run: Json) -> list[str]:
    """Return what cannot be checked of a run."""
    if run["kind"] == "engine":
        return [*([f"this run is of schema 1: {OLDER}"] if run["schema"] == 1 else []), _NEVER]
    return [*([] if _made_of_rounds(run) else [_TABLE]), _NEVER]


def edited(run: Json) -> list[str]:
    """Return where a run differs from what its own raw figures make."""
    if run["kind"] != "engine":
        return [*_table(run)]
    found: list[str] = []
    for name, row in run["rows"].items():
        check = _older if run["schema"] == 1 else _whole
        found += (f"{name}: {text}" for text in check(name, row))
    return found


def _made_of_rounds(run: Json) -> bool:
    return tuple(run["columns"]) in _ROWS and bool(run.get("rounds"))


def _table(run: Json) -> Iterator[str]:
    """Make a table's rows again of its rounds, and yield what differs."""
    if not _made_of_rounds(run):
        return
    rounds = run["rounds"]
    made = _ROWS[tuple(run["columns"])]([*rounds.values()] if isinstance(rounds, dict) else rounds)
    wanted = json.loads(json.dumps(made))  # as JSON has it
    if len(run["rows"]) != len(wanted):
        yield f"the table has {len(run['rows'])} rows, its rounds make {len(wanted)}"
    for stored, again in zip(run["rows"], wanted, strict=False):
        name = ", ".join(cell for cell in again[:2] if isinstance(cell, str))
        for column, *cells in zip(run["columns"], stored, again, strict=True):
            yield from _differences(f"{name}, {column}", *cells)


def _whole(name: str, row: Json) -> Iterator[str]:
    """Sum a row up again from its children, and yield what differs."""
    children = restored(row["children"])
    parameters = {label: case["parameters"] for label, case in row["cases"].items()}
    for child in children:
        if child.cases.keys() != parameters.keys():
            yield f"{child.name} has the cases {', '.join(child.cases)}"
            return
    again = summarise(parameters, row["sides"], children, row["baseline"])
    for side, text in _problem_lines(row):
        if (side, text) not in set(_problem_lines(again)):
            yield f"{text}: its children do not say so"
    for side, text in _problem_lines(again):
        if (side, text) not in set(_problem_lines(row)):
            yield f"{text}, and {side} has a ratio"
    for kind in ("rounds", "compared"):
        yield from _differences(kind, row[kind], again[kind])
    for label, case in row["cases"].items():
        for kind in again["cases"][label]:
            if kind != "problems":
                # as JSON has it
                wanted = json.loads(json.dumps(again["cases"][label][kind]))
                yield from _differences(f"{label}: {kind}", case[kind], wanted)
    yield from _raw(name, row)


def _problem_lines(row: Json) -> Iterator[tuple[str, str]]:
    """Yield each side and problem, without where exactly outputs differ."""
    for label, case in row["cases"].items():
        for side, texts in case["problems"].items():
            for text in texts:
                yield side, f"{label}: {text.partition(' differ: ')[0]}"


def _differences(where: str, stored: Any, wanted: Any) -> Iterator[str]:
    """Yield each place in which two pieces of JSON differ."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        for key in {**stored, **wanted}:
            below = f"{where}, {key}"
            yield from _differences(below, stored.get(key), wanted.get(key))
    elif stored != wanted:
        yield f"{where}: the run says {_short(stored)}, its children {_short(wanted)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _raw(name: str, row: Json) -> Iterator[str]:
    """Yield where figures of one child contradict one another."""
    for child in row["children"]:
        for label, case in child["cases"].items():
            wanted = _prompts(name, row, label, child["round"])
            texts = [*_clocked(case)]
            if wanted is not None and wanted != case["prompts"]:
                texts.append("its prompts are not those of its round")
            yield from (
                f"{label}: {child['side']} round {child['round']}: {text}" for text in texts
            )


def _clocked(case: Json) -> Iterator[str]:
    """Yield where the clocks of a child's case contradict its figures or its problems."""
    if not case["clock"]:
        return
    own, longest, *heard = case["clock"]
    tokens = case["counts"]["tokens"][0]
    # Where there are slices, others ran in that time.
    if not case["speeds"]:
        speed = tokens / own * 1e9
        if not math.isclose(speed, case["figures"]["tokens/s"], rel_tol=1e-6):
            yield f"{tokens} tokens in {own / 1e9:.3f} s are not its tokens/s"
    text = clock.problem(own, longest, *heard) if heard else None
    if text and text not in case["problems"]:
        yield text


def _prompts(name: str, row: Json, label: str, number: int) -> str | None:
    """Return the digest of a case's prompts; None if they cannot be drawn again here."""
    config: Mapping[str, Any] | str = row.get("model", "")
    if not isinstance(config, dict) or "prompt" not in row:
        return None
    case = row["cases"][label]["parameters"]
    bad = any("bad_words" in one for one in case["parameters"])
    place = Place(number, name, BASELINE if bad else label)
    size = {**model.CONFIG, **config}["vocab_size"]
    drawn = prompts.draw(place, case["batch"] or row["batch"], row["prompt"], size)
    if row["thinking"]:
        for one in drawn:
            one[-len(thinking.START) :] = thinking.START
    return prompts.digest(drawn)


def _older(name: str, row: Json) -> Iterator[str]:
    """Yield where medians, ratios and counts are not those of the rounds."""
    del name
    for label, case in row["cases"].items():
        for side, rounds in case["counts"].items():
            wrong = [kind for counts in rounds for kind, (n, m) in counts.items() if n != m]
            if wrong and not case["problems"].get(side):
                yield f"{label}: {side} lacks {', '.join(dict.fromkeys(wrong))}, and has a ratio"
        for figure, values in case["figures"].items():
            choose = max if figure.endswith("fastest round") else statistics.median
            for side in row["sides"]:
                seen = [value for value in values["rounds"][side] if value is not None]
                if not _same(values[side], choose(seen) if seen else None):
                    yield f"{label}: {figure} of {side} is not that of its rounds"
                if len(values["rounds"][side]) not in (row["rounds"], 0):
                    yield f"{label}: {figure} of {side} has not {row['rounds']} rounds"
            for side, ratio in values["ratios"].items():
                if ratio is not None and (
                    reasons(case, side) or not _same(ratio, values[side] / values["stock"])
                ):
                    yield f"{label}: the ratio of {side}'s {figure} is not that of its rounds"


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9)
