"""The rows of the engine's benchmark, and the driver's counts of what requests returned."""

import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench import thinking
from bench.engines import driver
from bench.engines.driver import Completion
from bench.engines.rows import BASELINE, ROWS, Case

BASE = [[10, 11, 12], [20, 21, 22]]


@pytest.mark.parametrize("size", ["full", "small", "tiny"])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_fits_its_engine(name: str, size: str) -> None:
    row = ROWS[name].sized(size)
    engine = row.engine
    assert next(iter(row.cases)) == BASELINE
    assert row.cases[BASELINE] == Case()
    assert engine.prompt + row.output <= engine.length
    assert row.output > 100 or size == "tiny"
    assert engine.model.get("max_position_embeddings", 512) >= engine.length
    assert engine.asynchronous or "Asynchronous" not in row.title
    if not any(case.beside for case in row.cases.values()):
        assert "another stream" not in row.title
    for label, case in row.cases.items():
        assert (case.batch or engine.batch) <= engine.batch
        if number := re.search(r"batch (\d+)", label):
            assert int(number[1]) == (case.batch or engine.batch)
        for parameters in case.parameters:
            assert sum(parameters.get("bad_words", ())) <= row.output
            if (budget := row.budget(parameters)) is not None:
                assert engine.thinking
                assert 0 < budget <= row.output - len(thinking.END)


def test_rows_share_one_engine_on_a_cpu() -> None:
    rows = [row for row in ROWS.values() if row.engine.runner == 1]
    assert len({str(row.sized("small").engine) for row in rows}) == 1


def test_an_output_length_can_be_given() -> None:
    row = ROWS["prime-rl-2772-thinking"]
    for size in ("full", "small"):
        assert row.sized(size, output=100).output == 100
    assert row.sized("full", output=100).budget({"thinking_token_budget": 0.75}) == 75


def test_words_are_the_tokens_one_after_the_other() -> None:
    assert driver.words([1, 2, 3, 4, 5, 6, 7], (3, 1, 2)) == [[1, 2, 3], [4], [5, 6]]


ENDED, ENDLESS = [1, *thinking.END, 2], [*thinking.END[:-1], 3]


@pytest.mark.parametrize(
    ("name", "case", "tokens", "counts"),
    [
        ("pull-23569", "5 bad words", [BASE[0], [20, 21, 9]], [[1, 2]]),
        ("prime-rl-2772-thinking", "presence 1.5, budget", [ENDED, ENDLESS], [[1, 2]]),
        ("prime-rl-2772", "presence 1.5", BASE, []),
    ],
)
def test_requests_that_felt_their_parameters_are_counted(
    name: str, case: str, tokens: list[list[int]], counts: list[list[int]]
) -> None:
    """Bad words must change every request, and budgets must be used up by every one."""
    row = ROWS[name]
    engine: Any = SimpleNamespace(spec=replace(row.engine, batch=len(tokens)), baseline=BASE)
    completions = [Completion(of_request) for of_request in tokens]
    felt = driver._count_effects(engine, row, row.cases[case], completions)
    assert list(felt.values()) == counts


@dataclass
class Logprob:
    """The logprob of one token in a position."""

    rank: int


def test_each_position_needs_the_sampled_token_and_every_rank() -> None:
    row = ROWS["issue-43450"]
    case = Case(({"logprobs": 2}, {}))
    whole = {5: Logprob(1), 6: Logprob(2)}
    lacking = {5: Logprob(1)}
    other = {7: Logprob(1), 6: Logprob(2)}
    completions = [Completion([5, 5, 5], [whole, lacking, other]), Completion([5, 5, 5])]
    assert driver._count_logprobs(row, case, completions, 2) == {
        "logprobs": [3, row.output],
        "positions with every logprob": [1, row.output],
    }
    unasked = driver._count_logprobs(row, Case(), [Completion([5], [whole])], 1)
    assert unasked["logprobs"] == [1, 0]


def test_the_engine_takes_the_markers_without_a_tokenizer() -> None:
    config = thinking.config()
    model: Any = None
    config.initialize_token_ids(model)
    assert config.enabled
    assert config.reasoning_start_token_ids == thinking.START
    assert config.reasoning_end_token_ids == thinking.END
