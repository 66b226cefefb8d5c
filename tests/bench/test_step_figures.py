"""The figures of an engine's steps, and the probe's records that refuse a ratio."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.compare import outputs
from bench.compare.summary import CaseResult
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.rows import BASELINE, ROWS, Case
from bench.engines.step_figures import results
from probe.records import Process, Span

MS = 1_000_000
#: Of a step: the worker's functions; what is left of 10 ms is outside.
EXECUTE, SAMPLE, OUTPUT = 2 * MS, 3 * MS, 4 * MS
STEP = 10 * MS
STEPS = 40
START = 1000 * MS
ROW = replace(ROWS["issue-43450"], output=STEPS, cases={BASELINE: Case()})

Change = Callable[[list[Span]], Iterable[Span]]


def spans(wait: int = 0, step: int = STEP) -> list[Span]:
    """A case's records: each step waits for ``wait`` in ``sample_tokens``."""
    records = []

    def put(kind: str, began: int, length: int, number: int, owner: str = "") -> None:
        continuing = 2 if number > 1 else 0
        records.append(Span(kind, began, began + length, number, owner, continuing, 7, 0))

    for number in range(1, STEPS + 1):
        began = START + (number - 1) * step
        sampled = began + EXECUTE + SAMPLE + wait
        put("execute_model", began, EXECUTE, number)
        put("sample_tokens", began + EXECUTE, SAMPLE + wait, number)
        if wait:
            put("fence", began + EXECUTE + MS, wait, number, "history")
        put("get_output", sampled, OUTPUT, number)
        if number > 1:
            put("output", sampled + OUTPUT - step, step, number)
    return records


def driven(step: int = STEP, **changes: Any) -> dict[str, Any]:
    """What the driver writes of a case."""
    tokens = outputs.pack([[str(token) for token in range(STEPS)]] * 2)
    case = {
        "window": [START, START + STEPS * step],
        "stamps": [START + number * step + 9 * MS for number in range(STEPS)],
        "longest": STEPS * step,
        "pauses": [],
        "copies": None,
        "disturbance": {"run delay": 0.01},
        "prompts": "digest",
        "quiet": None,
        "counts": {"tokens": [2 * STEPS, 2 * STEPS]},
        "problems": [],
        "tokens": tokens,
        "logprobs": "",
    }
    return case | changes


def result(
    change: Change = lambda seen: seen, case: Case | None = None, lost: int = 0, **times: int
) -> CaseResult:
    """The result of a case with altered records."""
    header = {"label": "rank0", "thread": 7, "lost": lost}
    probe = Process(Path("x"), header, list(change(spans(**times))))
    row = replace(ROW, cases={BASELINE: case or Case()})
    driven_case = driven(times.get("step", STEP))
    return results(row, {BASELINE: driven_case}, [probe])[BASELINE]


def test_each_further_rank_has_figures_of_its_own() -> None:
    ranks = [
        Process(Path("x"), {"label": label, "thread": 7, "lost": 0}, spans(wait))
        for label, wait in (("engine0", 0), ("rank0", 0), ("rank1", MS), ("rank2", 0))
    ]
    figures = results(ROW, {BASELINE: driven()}, ranks)[BASELINE].figures
    assert figures["sample_tokens p50"] == 3
    assert figures["rank1: sample_tokens p50"] == 4
    waits = [figures[f"rank{rank}: waiting in both, ms a step"] for rank in (1, 2)]
    assert waits == [pytest.approx(1), 0]
    assert not any(name.startswith(("rank0", "engine0")) for name in figures)


def test_pauses_are_in_no_figure() -> None:
    """Another side ran for a second behind the 20th output, and for another behind the 30th."""
    pauses: list[list[int]] = []
    cuts: list[int] = []
    for output in (20, 30):
        cut = START + output * STEP - MS // 2
        late = len(cuts) * 1000 * MS
        pauses.append([cut + late, cut + late + 1000 * MS])
        cuts.append(cut)

    def later(moment: int) -> int:
        return moment + 1000 * MS * sum(moment > cut for cut in cuts)

    case = driven(pauses=pauses)
    case["stamps"] = [later(stamp) for stamp in case["stamps"]]
    case["window"] = [later(moment) for moment in case["window"]]
    moved = [s._replace(began=later(s.began), ended=later(s.ended)) for s in spans()]
    probe = Process(Path("x"), {"label": "rank0", "thread": 7, "lost": 0}, moved)
    paused = results(ROW, {BASELINE: case}, [probe])[BASELINE]
    whole = result()
    assert paused.problems == whole.problems == []
    assert paused.figures == whole.figures
    assert paused.speeds == [100.0] * 3
    assert whole.speeds == []


def test_a_planted_slowdown_is_in_the_figures_of_its_part() -> None:
    slow = 5 * MS
    stock, overlaid = result(), result(wait=slow, step=STEP + slow)
    for figure, fast, slower in (
        ("sample_tokens p50", 3.0, 8.0),
        ("execute_model p50", 2.0, 2.0),
        ("get_output p99", 4.0, 4.0),
        ("step p50", 10.0, 15.0),
        ("ITL p50", 10.0, 15.0),
        ("tokens/s", 200.0, 400 / 3),
        ("fences, a step", 0.0, 1.0),
        ("fences, ms a step", 0.0, 5.0),
        ("waiting in sample_tokens, ms a step", 0.0, 5.0),
        ("waiting in get_output, ms a step", 0.0, 0.0),
        ("waiting in both, ms a step", 0.0, 5.0),
        ("sample_tokens + get_output p50", 7.0, 12.0),
        ("ITL max", 10.0, 15.0),
    ):
        assert stock.figures[figure] == pytest.approx(fast), figure
        assert overlaid.figures[figure] == pytest.approx(slower), figure
    assert overlaid.fences == {"history": STEPS}
    assert not stock.problems
    assert not overlaid.problems


def faster(seen: list[Span]) -> Iterable[Span]:
    for span in seen:
        began, ended = (round(START + (at - START) * 0.9) for at in (span.began, span.ended))
        yield span._replace(began=began, ended=ended)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda seen: [s for s in seen if not 20 < s.step < 31], "the probe saw 30 of 40 steps"),
        (lambda seen: [s for s in seen if not 20 < s.step < 31], "make up"),
        (faster, "make up"),
        (
            lambda seen: [*seen, next(s for s in seen if s.step == 20)],
            "the probe has execute_model not once a step",
        ),
    ],
)
def test_records_that_are_lost_twice_or_off_are_a_problem(change: Change, problem: str) -> None:
    assert any(problem in text for text in result(change).problems)


def test_a_ring_that_was_too_small_is_a_problem() -> None:
    assert result(lost=3).problems == ["the probe's ring lost 3 records"]


def test_steps_of_prompts_are_no_decoding_steps() -> None:
    def prompted(seen: list[Span]) -> Iterable[Span]:
        long = 300 * MS
        for span in seen:
            later = long if span.step != 1 or span.kind != "execute_model" else 0
            yield span._replace(began=span.began + later, ended=span.ended + long)

    assert result(prompted).figures["execute_model p99"] == pytest.approx(2)


def test_outputs_that_are_not_consumed_at_once_spoil_the_control() -> None:
    def late(seen: list[Span]) -> Iterable[Span]:
        for span in seen:
            moved = 5 * MS if span.kind == "fence" else 0
            yield span._replace(began=span.began + moved, ended=span.ended + moved)

    control = Case(consumed=True)
    (problem,) = result(late, control, wait=2 * MS, step=12 * MS).problems
    assert "not consumed at once" in problem
    assert not result(case=control, wait=2 * MS, step=12 * MS).problems


def test_without_records_there_is_a_problem_and_no_figure() -> None:
    blind = results(ROW, {BASELINE: driven()}, [])[BASELINE]
    assert blind.problems == ["the probe left no records"]
    assert "sample_tokens p50" not in blind.figures


@pytest.mark.parametrize(
    ("copies", "logprobs", "problem"),
    [
        ([250.0, 240.0], "", ""),
        ([250.0, ForeignCopies.LEAST * 999], "", "a copy took 200 ms"),
        ([], "", "a copy took 0 ms"),
        ([250.0], outputs.pack([["9"]]), "logprobs without copies and with them differ: request 0"),
    ],
)
def test_long_copies_run_beside_a_case_and_change_nothing(
    copies: list[float], logprobs: str, problem: str
) -> None:
    row = replace(ROW, cases={"beside": Case(beside=True)})
    beside = driven(logprobs=outputs.pack([["1"]]), copies=copies)
    beside["quiet"] = {kind: beside[kind] for kind in ("tokens", "logprobs")}
    beside["logprobs"] = logprobs or beside["logprobs"]
    header = {"label": "rank0", "thread": 7, "lost": 0}
    probe = [Process(Path("x"), header, spans())]
    read = results(row, {"beside": beside}, probe)["beside"]
    assert read.figures["copy, shortest"] == min(copies, default=None)
    assert len(read.problems) == bool(problem)
    assert all(problem in text for text in read.problems)
