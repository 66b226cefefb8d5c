"""The benchmark's report: no ratio where it would mean nothing."""

import copy
from typing import Any

import pytest
from bench import outputs, report

TOKENS = [[1, 2, 3], [4, 5, 6]]


def a_case(speed: float, tokens: list[list[int]]) -> dict[str, Any]:
    stream = [list(map(str, row)) for row in tokens]
    nothing: list[list[str]] = [[] for _ in tokens]
    return {
        "figures": {"tokens/s": speed, "ITL p50": 1000 / speed, "sample_tokens p99": None},
        "fences": {},
        "counts": {},
        "problems": [],
        "sha256": {"tokens": outputs.digest(stream), "logprobs": outputs.digest(nothing)},
        "tokens": outputs.pack(stream),
        "logprobs": outputs.pack(nothing),
    }


def a_child(side: str, turn: int, speed: float) -> dict[str, Any]:
    cases = {name: a_case(speed, TOKENS) for name in ("none", "presence")}
    return {"row": "half-b", "side": side, "round": turn, "cases": cases}


@pytest.fixture
def children() -> list[dict[str, Any]]:
    """Two rounds, the overlaid side twice as fast."""
    return [
        a_child(side, turn, speed + turn)
        for turn in (1, 2)
        for side, speed in (("stock", 100.0), ("overlaid", 200.0))
    ]


def test_a_ratio_is_that_of_the_medians(children: list[dict[str, Any]]) -> None:
    found = report.summary(children)["half-b"]["presence"]
    assert found["problems"] == []
    assert found["figures"]["tokens/s"]["ratio"] == pytest.approx(201.5 / 101.5)
    assert found["figures"]["sample_tokens p99"]["ratio"] is None


def test_differing_outputs_are_named_and_refuse_every_ratio(
    children: list[dict[str, Any]],
) -> None:
    other = [[1, 2, 3], [4, 9, 6]]
    children[3]["cases"]["presence"] = a_case(300.0, other)
    found = report.summary(children)["half-b"]
    (problem,) = found["presence"]["problems"]
    assert "overlaid round 2" in problem
    assert "request 1, position 1" in problem
    assert all(values["ratio"] is None for values in found["presence"]["figures"].values())
    assert found["none"]["problems"] == []


def test_a_side_that_is_missing_refuses_every_ratio(children: list[dict[str, Any]]) -> None:
    found = report.summary([child for child in children if child["side"] == "stock"])
    assert found["half-b"]["none"]["problems"] == ["overlaid was not measured"]


def test_a_childs_own_problem_refuses_every_ratio(children: list[dict[str, Any]]) -> None:
    spoilt = copy.deepcopy(children)
    spoilt[0]["cases"]["none"]["problems"] = ["7 of 8 tokens"]
    found = report.summary(spoilt)["half-b"]["none"]
    assert found["problems"] == ["stock round 1: 7 of 8 tokens"]
    assert found["figures"]["tokens/s"]["ratio"] is None


def test_fences_are_those_of_the_worst_round_and_of_a_thousand_steps() -> None:
    rounds = [{"thinking budget": 4}, {"thinking budget": 10, "output": 1}]
    assert report._fences(rounds, 4000) == (
        "output 1 (0.2 a thousand steps) thinking budget 10 (2.5 a thousand steps)"
    )
    assert report._fences([{}, {}], 4000) == "none counted"
