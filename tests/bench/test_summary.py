"""The summary of a run: its medians and ratios, and the problems that refuse a ratio."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from bench.compare import outputs
from bench.compare.summary import CaseResult, Child, summarise

BASE, CASE = "none", "logprobs"
TOKENS = [[str(token) for token in range(20)] for _ in range(2)]
WRONG = [TOKENS[0], [*TOKENS[1][:17], "99", *TOKENS[1][18:]]]


def result(figure: float | None = 10.0, tokens: outputs.Stream = TOKENS, **more: Any) -> CaseResult:
    return CaseResult(
        {"ITL p50": figure, "fences, a step": 1.0}, {"tokens": outputs.pack(tokens)}, **more
    )


def child(side: str, turn: int = 1, *args: Any, **more: Any) -> Child:
    """A child whose case has these results, and whose baseline takes 5 ms."""
    return Child(side, turn, {BASE: result(5.0), CASE: result(*args, **more)})


def summed(*children: Child) -> dict[str, Any]:
    return summarise({BASE: {}, CASE: {}}, ("stock", "overlaid"), children, BASE)


def problems(summary: Mapping[str, Any], side: str) -> Sequence[str]:
    given: Sequence[str] = summary["cases"][CASE]["problems"][side]
    return given


def ratios(summary: Mapping[str, Any], case: str = CASE) -> list[float | None]:
    """Every ratio to stock, and the costs of the overlaid side."""
    figures = summary["cases"][case]["figures"]
    compared = [ratio for values in figures.values() for ratio in values["ratios"].values()]
    return [*compared, *(v["overlaid"] for name, v in figures.items() if " / " in name)]


def test_medians_are_over_the_rounds() -> None:
    stock = [child("stock", turn, ms) for turn, ms in enumerate((10.0, 30.0, 11.0), 1)]
    summary = summed(*stock, *(child("overlaid", turn, 22.0) for turn in (1, 2, 3)))
    figures = summary["cases"][CASE]["figures"]
    assert (figures["ITL p50"]["stock"], figures["ITL p50"]["overlaid"]) == (11, 22)
    assert figures["ITL p50"]["rounds"]["stock"] == [10, 30, 11]
    assert figures["ITL p50"]["ratios"] == {"overlaid": 2}
    assert figures["ITL p50 / none"]["overlaid"] == pytest.approx(22 / 5)
    # Stock's probe sees fewer waits than the overlay's.
    assert figures["fences, a step"]["ratios"] == {}
    assert not problems(summary, "stock")


def test_the_fastest_round_stands_beside_the_median() -> None:
    def speed(side: str, turn: int, value: float) -> Child:
        return Child(
            side, turn, {name: CaseResult({"tokens/s": value}, {}) for name in (BASE, CASE)}
        )

    stock = [speed("stock", turn, value) for turn, value in enumerate((90.0, 80.0, 100.0), 1)]
    ours = [speed("overlaid", turn, value) for turn, value in enumerate((150.0, 60.0, 70.0), 1)]
    figures = summed(*stock, *ours)["cases"][CASE]["figures"]
    best, usual = figures["tokens/s, fastest round"], figures["tokens/s"]
    assert (usual["stock"], usual["overlaid"]) == (90, 70)
    assert (best["stock"], best["overlaid"], best["ratios"]) == (100, 150, {"overlaid": 1.5})
    assert best["rounds"] == usual["rounds"]


def test_of_the_longest_wait_the_worst_round_is_shown() -> None:
    def stalled(side: str, turn: int, longest: float) -> Child:
        return Child(side, turn, {CASE: CaseResult({"ITL max": longest}, {})})

    times = enumerate((7.0, 272.0, 8.0), 1)
    children = [stalled(side, turn, ms) for turn, ms in times for side in ("stock", "overlaid")]
    figure = summarise({CASE: {}}, ("stock", "overlaid"), children)["cases"][CASE]["figures"]
    assert (figure["ITL max"]["stock"], figure["ITL max"]["ratios"]) == (272.0, {})


def test_rounds_of_one_side_alone_are_left_out() -> None:
    summary = summed(child("stock", 1), child("stock", 2, 30.0), child("overlaid", 1))
    assert (summary["rounds"], summary["compared"]) == (1, [1])
    figure = summary["cases"][CASE]["figures"]["ITL p50"]
    assert (figure["rounds"]["stock"], figure["ratios"]) == ([10.0], {"overlaid": 1})
    nothing = summed(child("stock", 1), child("overlaid", 2))
    assert nothing["rounds"] == 0
    assert problems(nothing, "stock") == ["no round was measured on every side"]
    assert nothing["cases"][CASE]["figures"] == {}


def test_a_wrong_token_in_a_round_that_another_side_lacks_is_a_problem() -> None:
    summary = summed(child("stock"), child("overlaid"), child("overlaid", 2, tokens=WRONG))
    assert summary["compared"] == [1]
    (problem,) = problems(summary, "overlaid")
    assert problem == (
        "tokens of stock round 1 and overlaid round 2 differ: request 1, position 17: 17 against 99"
    )
    assert set(ratios(summary)) == {None}
    assert None not in ratios(summary, BASE)


def test_a_problem_of_several_rounds_is_listed_once() -> None:
    faults = {"tokens": WRONG, "counts": {"logprobs": (79, 80)}, "problems": ["it was late"]}
    ours = [child("overlaid"), *(child("overlaid", turn, **faults) for turn in (2, 3))]
    summary = summed(*(child("stock", turn) for turn in (1, 2, 3)), *ours)
    assert problems(summary, "overlaid") == [
        "overlaid rounds 2, 3: 79 of 80 logprobs",
        "overlaid rounds 2, 3: it was late",
        "tokens of stock round 1 and overlaid rounds 2, 3 differ: request 1, position 17: "
        "17 against 99",
    ]
    assert set(ratios(summary)) == {None}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ({"counts": {"logprobs": (79, 80)}}, "stock round 2: 79 of 80 logprobs"),
        ({"tokens": WRONG}, "tokens of stock round 1 and stock round 2 differ"),
    ],
)
def test_a_problem_of_stock_refuses_every_ratio(fault: Any, problem: str) -> None:
    ours = [child("overlaid", turn) for turn in (1, 2)]
    summary = summed(child("stock"), child("stock", 2, **fault), *ours)
    assert any(text.startswith(problem) for text in problems(summary, "stock"))
    assert problems(summary, "overlaid") == []
    assert summary["cases"][CASE]["figures"]["ITL p50"]["ratios"] == {"overlaid": None}


def test_a_problem_of_the_baseline_refuses_the_costs_of_other_cases() -> None:
    spoilt = Child("overlaid", 1, {BASE: result(5.0, WRONG), CASE: result()})
    figures = summed(child("stock"), spoilt)["cases"][CASE]["figures"]
    assert figures["ITL p50"]["ratios"] == {"overlaid": 1}
    cost = figures["ITL p50 / none"]
    assert (cost["stock"], cost["overlaid"]) == (2, None)


def test_what_was_not_measured_or_seen_has_no_ratio() -> None:
    summary = summed(child("stock"))
    assert problems(summary, "overlaid") == ["overlaid was not measured"]
    assert summary["cases"][CASE]["figures"]["ITL p50"]["ratios"] == {"overlaid": None}
    unseen = summed(child("stock"), child("overlaid", 1, None))
    assert unseen["cases"][CASE]["figures"]["ITL p50"]["overlaid"] is None
    assert set(ratios(unseen)) == {None}


def test_of_many_logprobs_the_first_that_differs_is_shown() -> None:
    one, other = [["a:1:-0.5 b:2:-0.7 c:3:-1"]], [["a:1:-0.5 b:2:-0.8 c:3:-2"]]
    assert outputs.first_difference(one, other) == (
        "request 0, position 0: word 1: b:2:-0.7 against b:2:-0.8"
    )
    assert outputs.first_difference(one, [["a:1:-0.5"]]) == (
        "request 0, position 0: word 1: b:2:-0.7 against nothing"
    )
