"""The summary of a run: its figures and ratios, and the problems that refuse a ratio."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.compare import outputs
from bench.engines import step_figures
from bench.engines.foreign_copies import ForeignCopies
from bench.engines.rows import BASELINE, ROWS, Case, Row
from bench.engines.step_figures import Child
from bench.engines.summary import summarise
from probe.records import Process, Span, Step

MS = 1_000_000
#: Of a step: the worker's functions; what is left of 10 ms is outside.
EXECUTE, SAMPLE, OUTPUT = 2 * MS, 3 * MS, 4 * MS
STEP = 10 * MS
STEPS = 40

ROW = replace(
    ROWS["issue-43450"],
    output=STEPS,
    cases={BASELINE: Case(), "logprobs": Case(({"logprobs": 1},))},
)

Change = Callable[[dict[str, Any]], None]


def spans(began: int, first: int, wait: int = 0, step: int = STEP) -> list[Span]:
    """A case's records: each step waits for ``wait`` in ``sample_tokens``."""
    made = []

    def put(kind: str, at: int, length: int, number: int, owner: str = "") -> None:
        made.append(Span(kind, at, at + length, number, owner, 2 if number > first else 0, 7, 0))

    for number in range(first, first + STEPS):
        at = began + (number - first) * step
        put("execute_model", at, EXECUTE, number)
        put("sample_tokens", at + EXECUTE, SAMPLE + wait, number)
        if wait:
            put("fence", at + EXECUTE + MS, wait, number, "history")
        put("get_output", at + EXECUTE + SAMPLE + wait, OUTPUT, number)
        if number > first:
            put("output", at + EXECUTE + SAMPLE + wait + OUTPUT - step, step, number)
    return made


def case(began: int, step: int = STEP, tokens: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """What a child wrote of a case."""
    given = [[str(token) for token in each] for each in tokens or [range(STEPS)] * 2]
    logprobs = [[f"{token}:1:-0.5" for token in each] for each in given]
    return {
        "window": [began, began + STEPS * step],
        "stamps": [began + number * step + 9 * MS for number in range(STEPS)],
        "beside": None,
        "copies": None,
        "counts": {"tokens": [2 * STEPS, 2 * STEPS], "logprobs": [2 * STEPS, 2 * STEPS]},
        "problems": [],
        "sha256": {"tokens": outputs.digest(given), "logprobs": outputs.digest(logprobs)},
        "tokens": outputs.pack(given),
        "logprobs": outputs.pack(logprobs),
    }


def child(side: str, turn: int = 1, wait: int = 0, step: int = STEP, **cases: Any) -> Child:
    """A child in which both cases ran one after the other."""
    start = 1000 * MS
    then = start + STEPS * step + 50 * MS
    found = {BASELINE: case(start, step), "logprobs": case(then, step), **cases}
    header = {"label": "rank0", "thread": 7, "lost": 0}
    seen = Process(
        Path("x"), header, spans(start, 1, wait, step) + spans(then, 1 + STEPS, wait, step)
    )
    made = {"async scheduling": True, "rows": {ROW.name: found}}
    return Child(side, turn, made, [seen])


def summed(*children: Child, row: Row = ROW) -> dict[str, Any]:
    return summarise(row, ("stock", "overlaid"), children)


def test_a_planted_slowdown_is_in_the_figures_of_its_part() -> None:
    slow = 5 * MS
    found = summed(child("stock"), child("overlaid", wait=slow, step=STEP + slow))
    figures = found["cases"]["logprobs"]["figures"]
    for figure, stock, overlaid in (
        ("sample_tokens p50", 3.0, 8.0),
        ("execute_model p50", 2.0, 2.0),
        ("get_output p99", 4.0, 4.0),
        ("step p50", 10.0, 15.0),
        ("ITL p50", 10.0, 15.0),
        ("fences, a step", 0.0, 1.0),
        ("fences, ms a step", 0.0, 5.0),
        ("waiting in sample_tokens, ms a step", 0.0, 5.0),
        ("waiting in get_output, ms a step", 0.0, 0.0),
    ):
        assert figures[figure]["stock"] == pytest.approx(stock), figure
        assert figures[figure]["overlaid"] == pytest.approx(overlaid), figure
    assert figures["ITL p50"]["ratios"]["overlaid"] == pytest.approx(1.5)
    assert figures["tokens/s"]["ratios"]["overlaid"] == pytest.approx(10 / 15)
    # Stock's probe sees fewer waits than the overlay's.
    for name in ("fences, a step", "fences, ms a step", "waiting in sample_tokens, ms a step"):
        assert figures[name]["ratios"] == {}, name
    assert found["cases"]["logprobs"]["fences"]["overlaid"] == [{"history": STEPS}]
    assert not any(found["cases"]["logprobs"]["problems"].values())


def test_medians_are_over_the_rounds() -> None:
    times = (10, 30, 11)
    children = [child("stock", turn, step=ms * MS) for turn, ms in enumerate(times, 1)]
    ours = [child("overlaid", turn) for turn in (1, 2, 3)]
    figure = summed(*children, *ours)["cases"]["logprobs"]["figures"]["step p50"]
    assert figure["stock"] == pytest.approx(11)
    assert figure["rounds"]["stock"] == pytest.approx([10, 30, 11])
    assert figure["ratios"]["overlaid"] == pytest.approx(10 / 11)


def test_rounds_of_one_side_alone_are_left_out() -> None:
    stock = [child("stock", turn, step=ms * MS) for turn, ms in ((1, 10), (2, 30))]
    found = summed(*stock, child("overlaid", 1))
    assert found["rounds"] == 1
    figure = found["cases"]["logprobs"]["figures"]["step p50"]
    assert figure["ratios"]["overlaid"] == pytest.approx(1)
    assert figure["rounds"]["stock"] == pytest.approx([10])


def test_a_wrong_token_in_a_round_that_another_side_lacks_is_a_problem() -> None:
    spoilt = child("overlaid", 2)
    wrong_token(spoilt.result["rows"][ROW.name]["logprobs"])
    found = summed(child("stock"), child("overlaid"), spoilt)
    assert found["compared"] == [1]
    assert len(found["cases"]["logprobs"]["counts"]["overlaid"]) == 1
    problem, _ = found["cases"]["logprobs"]["problems"]["overlaid"]
    assert problem.startswith("tokens of stock round 1 and overlaid round 2 differ: request 1")
    assert set(found["cases"]["logprobs"]["figures"]["ITL p50"]["ratios"].values()) == {None}


def test_sides_without_a_common_round_have_no_ratio() -> None:
    found = summed(child("stock", 1), child("overlaid", 2))
    assert found["rounds"] == 0
    case = found["cases"]["logprobs"]
    assert case["problems"] == {"stock": ["no round was measured on every side"], "overlaid": []}
    assert case["figures"] == {}


def test_a_problem_of_several_rounds_is_listed_once() -> None:
    ours = [child("overlaid", turn) for turn in (1, 2, 3)]
    for spoilt in ours[1:]:
        wrong_token(spoilt.result["rows"][ROW.name]["logprobs"])
        lost_logprob(spoilt.result["rows"][ROW.name]["logprobs"])
    found = summed(*[child("stock", turn) for turn in (1, 2, 3)], *ours)
    assert found["cases"]["logprobs"]["problems"]["overlaid"] == [
        "overlaid rounds 2, 3: 79 of 80 logprobs",
        "tokens of stock round 1 and overlaid rounds 2, 3 differ: request 1, position 17: "
        "17 against 99",
        "logprobs of stock round 1 and overlaid rounds 2, 3 differ: request 1, position 17: "
        "17:1:-0.5 against 99:1:-0.5",
    ]


def test_of_many_logprobs_the_first_that_differs_is_shown() -> None:
    one, other = [["a:1:-0.5 b:2:-0.7 c:3:-1"]], [["a:1:-0.5 b:2:-0.8 c:3:-2"]]
    assert outputs.first_difference(one, other) == (
        "request 0, position 0: word 1: b:2:-0.7 against b:2:-0.8"
    )
    assert outputs.first_difference(one, [["a:1:-0.5"]]) == (
        "request 0, position 0: word 1: b:2:-0.7 against nothing"
    )


def wrong_token(found: dict[str, Any]) -> None:
    tokens = [list(range(STEPS)), [*range(17), 99, *range(18, STEPS)]]
    found.update(case(found["window"][0], tokens=tokens))


def lost_logprob(found: dict[str, Any]) -> None:
    found["counts"]["logprobs"][0] -= 1
    found["problems"].append("79 of 80 logprobs")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            wrong_token,
            "tokens of stock round 1 and overlaid round 1 differ: request 1, position 17: "
            "17 against 99",
        ),
        (lost_logprob, "overlaid round 1: 79 of 80 logprobs"),
    ],
)
def test_no_ratio_of_outputs_that_differ_or_are_lost(change: Change, sentence: str) -> None:
    spoilt = child("overlaid")
    change(spoilt.result["rows"][ROW.name]["logprobs"])
    cases = summed(child("stock"), spoilt)["cases"]
    assert sentence in cases["logprobs"]["problems"]["overlaid"]
    for name, figure in cases["logprobs"]["figures"].items():
        assert figure["ratios"].get("overlaid") is None
        assert " / " not in name or figure["overlaid"] is None
    assert cases[BASELINE]["figures"]["ITL p50"]["ratios"]["overlaid"] == pytest.approx(1)


def test_a_problem_of_stock_refuses_every_ratio() -> None:
    spoilt = child("stock", 2)
    lost_logprob(spoilt.result["rows"][ROW.name]["logprobs"])
    ours = [child("overlaid", turn) for turn in (1, 2)]
    found = summed(child("stock"), spoilt, *ours)["cases"]["logprobs"]
    assert found["problems"]["stock"] == ["stock round 2: 79 of 80 logprobs"]
    assert found["problems"]["overlaid"] == []
    assert found["figures"]["ITL p50"]["ratios"] == {"overlaid": None}


def test_a_side_that_was_not_measured_has_no_ratio() -> None:
    found = summed(child("stock"))["cases"]["logprobs"]
    assert found["problems"]["overlaid"] == ["overlaid was not measured"]
    assert found["figures"]["ITL p50"]["ratios"] == {"overlaid": None}


def altered(made: Child, change: Callable[[list[Span]], Iterable[Span]]) -> Child:
    process = made.probe[0]
    return replace(made, probe=[replace(process, spans=list(change(process.spans)))])


def test_steps_that_the_probe_lost_are_a_problem() -> None:
    lossy = altered(child("stock"), lambda seen: [s for s in seen if not 20 < s.step % STEPS < 31])
    problems = summed(lossy, child("overlaid"))["cases"]["logprobs"]["problems"]["stock"]
    assert "stock round 1: the probe saw 30 of 40 steps" in problems
    assert any("make up" in problem for problem in problems)


def test_a_probe_whose_clock_is_off_is_a_problem() -> None:
    def faster(seen: list[Span]) -> Iterable[Span]:
        start = seen[0].began
        for span in seen:
            began, ended = (round(start + (at - start) * 0.9) for at in (span.began, span.ended))
            yield span._replace(began=began, ended=ended)

    found = summed(altered(child("stock"), faster), child("overlaid"))["cases"][BASELINE]
    assert any("make up" in problem for problem in found["problems"]["stock"])


def test_a_record_that_is_there_twice_is_a_problem() -> None:
    twice = altered(child("stock"), lambda seen: [*seen, next(s for s in seen if s.step == 20)])
    found = summed(twice, child("overlaid"))["cases"][BASELINE]
    assert found["problems"]["stock"] == [
        "stock round 1: the probe has execute_model not once a step"
    ]


def test_steps_of_prompts_are_no_decoding_steps() -> None:
    def prompted(seen: list[Span]) -> Iterable[Span]:
        long = 300 * MS
        for span in seen:
            later = long if span.step % STEPS != 1 or span.kind != "execute_model" else 0
            yield span._replace(began=span.began + later, ended=span.ended + long)

    made = altered(child("stock"), prompted)
    figures = summed(made, child("overlaid"))["cases"][BASELINE]["figures"]
    assert figures["execute_model p99"]["stock"] == pytest.approx(2)


def test_outputs_that_are_not_consumed_at_once_spoil_the_control() -> None:
    control = replace(ROW, cases={BASELINE: Case(), "logprobs": Case(consumed=True)})

    def late(seen: list[Span]) -> Iterable[Span]:
        for span in seen:
            moved = 5 * MS if span.kind == "fence" else 0
            yield span._replace(began=span.began + moved, ended=span.ended + moved)

    waits = child("stock", wait=2 * MS, step=12 * MS)
    found = summed(altered(waits, late), child("overlaid"), row=control)["cases"]["logprobs"]
    (problem,) = found["problems"]["stock"]
    assert "not consumed at once" in problem
    assert not summed(waits, child("overlaid"), row=control)["cases"]["logprobs"]["problems"][
        "stock"
    ]


def test_without_records_there_is_no_ratio() -> None:
    blind = replace(child("overlaid"), probe=[])
    found = summed(child("stock"), blind)["cases"]["logprobs"]
    assert found["problems"]["overlaid"] == ["overlaid round 1: the probe left no records"]
    assert found["figures"]["sample_tokens p50"]["overlaid"] is None


def test_the_series_has_every_length_once() -> None:
    found = summed(child("stock"), child("overlaid"))["cases"][BASELINE]["series"]["stock"]
    assert found["length"][0] == 2
    assert found["length"][-1] == STEPS
    assert found["ms"] == pytest.approx([10.0] * len(found["length"]))


def seen_steps(waits: Sequence[float]) -> list[Step]:
    """Steps of 10 ms and their waits, in ms."""
    return [
        Step(n, n * STEP, (n + 1) * STEP, {"sample_tokens": round(wait * MS)})
        for n, wait in enumerate(waits)
    ]


def marks(noisy: Iterable[int]) -> list[int]:
    return [number * STEP + MS for number in noisy]


def test_steps_beside_a_copy_are_held_against_quiet_ones() -> None:
    steps = seen_steps([4.0, 6.0, 4.0, 6.0, 9.0, 0.0])
    figures = step_figures.beside_figures(steps, marks([1, 3, 4]), [250.0, 240.0])
    assert figures["steps begun beside the copy"] == 3
    assert figures["copy, shortest"] == 240.0
    assert figures["wait of a step, quiet, p50"] == pytest.approx(4.0)
    assert figures["wait of a step, beside the copy, p50"] == pytest.approx(6.0)
    assert figures["wait of a step, beside / quiet, max"] == pytest.approx(9 / 4)
    assert figures["step, beside / quiet, p50"] == pytest.approx(1.0)
    none = step_figures.beside_figures(steps, [], [])
    assert none["wait of a step, beside / quiet, p50"] is none["copy, shortest"] is None


@pytest.mark.parametrize(
    ("noisy", "length", "problems"),
    [
        (20, 250.0, 0),
        (2, 250.0, 1),
        (39, 250.0, 1),
        (20, ForeignCopies.LEAST * 999, 1),
        (1, 9.0, 2),
    ],
)
def test_few_steps_or_a_short_copy_spoil_the_case(noisy: int, length: float, problems: int) -> None:
    steps = seen_steps([4.0] * 40)
    assert (
        len(step_figures.beside_problems(steps, marks(range(noisy)), [250.0, length])) == problems
    )
