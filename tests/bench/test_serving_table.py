"""The table of a serving run: what refuses a ratio, and which rounds are compared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.compare.installations import SIDES
from bench.reports import figures, markdown
from bench.servers.load import CASES, Load
from bench.servers.processes import Setting
from bench.servers.table import FIGURES, LATENCIES, CaseResult, read_result, table
from support import runs
from support.serving_results import LOGPROBS, PENALTY, PLAIN, answers, made, row_of

LOAD = Load({}, requests=4, concurrency=2, prompt=8, output=3)


def read(case: str, side: str, alter: Callable[[Any, Any], object] | None = None) -> CaseResult:
    written = answers(case)
    if alter:
        alter(written["client"], written["single"]["choices"][0])
    return read_result(written, case, side, 1, LOAD, True)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    anything: Any = None
    return Setting(anything, "python", tmp_path, tmp_path, tmp_path, LOAD)


def test_a_result_is_read_whole(setting: Setting) -> None:
    run = table({case: [read(case, side) for side in SIDES] for case in CASES}, setting)
    assert run["problems"] == []
    for case in CASES:
        assert row_of(run, "responses", case)[:2] == ["4 of 4"] * 2
        assert row_of(run, "tokens", case)[:2] == ["12 of 12"] * 2
        assert row_of(run, "tokens in the texts", case)[:2] == ["12 of 12"] * 2
        assert row_of(run, case=case) == [2.0, 2.0, [1.0, figures.FEW]]
    assert row_of(run, "logprobs of one request", LOGPROBS)[:2] == ["3 of 3"] * 2


def lose_response(client: Any, _: Any) -> None:
    client |= {"completed": 3, "total_output_tokens": 9}
    client["generated_texts"][1] = ""
    client["errors"][1] = "Traceback\n  ...\nConnectionError: gone\n"


@pytest.mark.parametrize(
    ("case", "alter", "problems"),
    [
        (
            PENALTY,
            lambda client, _: client["generated_texts"].__setitem__(2, "t2 t1 t9"),
            ["texts of stock round 1 and overlaid round 1 differ: request 2, position 2: t2"],
        ),
        (
            PLAIN,
            lose_response,
            ["3 of 4 responses", "9 of 12 tokens", "request 1 failed: ConnectionError: gone"],
        ),
        (
            PLAIN,
            lambda client, _: client["generated_texts"].__setitem__(3, " t3 t1"),
            ["11 of 12 tokens in the texts", "request 3, position 2"],
        ),
        (
            PLAIN,
            lambda _, single: single["token_ids"].__setitem__(1, 9),
            ["token ids of one request alone of stock round 1 and overlaid round 1 differ"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["top_logprobs"].__setitem__(1, {"a": -0.5}),
            ["2 of 3 logprobs of one request"],
        ),
        (
            LOGPROBS,
            lambda _, single: single["logprobs"]["token_logprobs"].__setitem__(2, -0.6),
            ["logprobs of one request alone of stock round 1 and overlaid round 1 differ"],
        ),
    ],
)
def test_a_fault_is_named_and_refuses_the_ratios_of_its_case(
    setting: Setting, case: str, alter: Callable[[Any, Any], object], problems: Sequence[str]
) -> None:
    results = {name: [read(name, side) for side in SIDES] for name in CASES}
    results[case][1] = read(case, "overlaid", alter)
    run = table(results, setting)
    for problem in problems:
        assert any(problem in text and text.startswith(f"{case}: ") for text in run["problems"])
    for name in CASES:
        refused = {row_of(run, figure, name)[2] == figures.REFUSED for figure in FIGURES}
        assert refused == {name == case}


def test_stock_that_differs_from_itself_refuses_every_ratio(setting: Setting) -> None:
    other = made("stock", 2, words="t2")
    run = table({PLAIN: [made("stock", 1), made("overlaid", 1), other]}, setting)
    (problem,) = run["problems"]
    assert "stock round 1 and stock round 2" in problem
    assert "VLLM_BATCH_INVARIANT" in problem
    assert row_of(run)[2] == figures.REFUSED


@pytest.mark.parametrize(("mean", "bursts"), [(2.0, False), (10.0, True)])
def test_bursts_refuse_the_latencies_alone(setting: Setting, mean: float, bursts: bool) -> None:
    late = read(PLAIN, "overlaid", lambda client, _: client.update(mean_itl_ms=mean))
    run = table({PLAIN: [read(PLAIN, "stock"), late]}, setting)
    assert any("overlaid round 1: tokens came in bursts" in p for p in run["problems"]) == bursts
    refused = {figure for figure in FIGURES if row_of(run, figure)[2] == figures.REFUSED}
    assert refused == (set(LATENCIES) if bursts else set())


@pytest.mark.parametrize(
    ("stock", "overlaid", "cells", "mark"),
    [
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4), [1.1, 2.2, 2.0], ""),
        ((1.0, 2.0, 3.0), (3.0, 4.0, 5.0), [2.0, 4.0, [2.0, "~"]], "~"),
        ((1.0,), (2.0,), [1.0, 2.0, [2.0, "?"]], "?"),
        # Only rounds of both sides count.
        ((10.0, 20.0, 10.0), (10.0, 20.0), [15.0, 15.0, [1.0, "~"]], "~"),
        ((1.0, 3.0), (), [2.0, "not measured", "refused"], ""),
    ],
)
def test_medians_ratios_and_their_marks(
    setting: Setting,
    stock: Sequence[float],
    overlaid: Sequence[float],
    cells: list[object],
    mark: str,
) -> None:
    rounds = {"stock": stock, "overlaid": overlaid}
    given = [made(side, n, value) for side in SIDES for n, value in enumerate(rounds[side], 1)]
    other = [made(side, 1) for side in SIDES]
    run = table({PLAIN: given, PENALTY: other}, setting)
    assert row_of(run) == cells
    text = markdown.markdown(runs.head("table") | run)
    assert (figures.MARKS[figures.NOISE] in text) == (mark == "~")
    assert len(run["cases"][PLAIN]["rounds"]["stock"]) == len(stock)


def test_rounds_that_are_not_compared_may_spoil_a_ratio(setting: Setting) -> None:
    alike = [made(side, n) for side in SIDES for n in (1, 2)]
    for spoilt, problem in (
        (made("stock", 3, words="t2"), "texts of stock round 1 and stock round 3 differ"),
        (replace(made("stock", 3), counts={"tokens": (0, 1)}), "stock round 3: 0 of 1 tokens"),
    ):
        run = table({PLAIN: [*alike, spoilt]}, setting)
        assert any(problem in text for text in run["problems"])
        assert row_of(run)[2] == figures.REFUSED


def test_sides_without_a_common_round_are_not_compared(setting: Setting) -> None:
    run = table({PLAIN: [made("stock", 1), made("overlaid", 2)]}, setting)
    assert row_of(run) == ["not compared", "not compared", "refused"]
    assert run["problems"] == [f"{PLAIN}: no round has every side, so there is nothing to compare"]


def test_without_stock_there_is_no_ratio(setting: Setting) -> None:
    run = table({PLAIN: [made("overlaid", 1)]}, setting)
    assert run["columns"][2:] == ["overlaid", "overlaid / stock"]
    assert row_of(run)[1] == figures.REFUSED
