"""What the benchmark of the engine asks of requests, and how it sees that they met it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench import thinking
from bench.engines import driver
from bench.engines.rows import BASELINE, ROWS, Case, Row

BASE = [[10, 11, 12], [20, 21, 22]]


@dataclass
class Done:
    """A completion."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None = None


def met(row: Row, case: Case, *given: list[int]) -> dict[str, list[int]]:
    engine: Any = SimpleNamespace(spec=replace(row.engine, batch=len(given)), baseline=BASE)
    return driver._count_effects(engine, row, case, [Done(tokens) for tokens in given])


def test_words_are_the_tokens_one_after_the_other() -> None:
    assert driver.words([1, 2, 3, 4, 5, 6, 7], (3, 1, 2)) == [[1, 2, 3], [4], [5, 6]]


def sizes(name: str) -> tuple[Row, ...]:
    return tuple(ROWS[name].sized(size) for size in ("full", "small", "tiny"))


@pytest.mark.parametrize("name", ROWS)
def test_the_baseline_is_first_and_has_tokens_for_every_word(name: str) -> None:
    for row in sizes(name):
        assert next(iter(row.cases)) == BASELINE
        assert row.cases[BASELINE] == Case()
        for case in row.cases.values():
            for parameters in case.parameters:
                assert sum(parameters.get("bad_words", ())) <= row.output
                assert row.engine.thinking or "thinking_token_budget" not in parameters


@pytest.mark.parametrize("name", ROWS)
def test_the_engine_has_room_for_every_case(name: str) -> None:
    for row in sizes(name):
        assert row.engine.prompt + row.output <= row.engine.length
        assert row.engine.model.get("max_position_embeddings", 512) >= row.engine.length
        for case in row.cases.values():
            assert (case.batch or row.engine.batch) <= row.engine.batch


@pytest.mark.parametrize("name", ROWS)
def test_a_budget_ends_within_the_output(name: str) -> None:
    for row in sizes(name):
        for case in row.cases.values():
            for parameters in case.parameters:
                if (budget := row.budget(parameters)) is not None:
                    assert 0 < budget <= row.output - len(thinking.END)


@pytest.mark.parametrize("name", ROWS)
def test_what_runs_beside_a_copy_runs_without_it_too(name: str) -> None:
    row = ROWS[name]
    for case, each in row.cases.items():
        assert row.cases[row.without_copies(case)].parameters == each.parameters
        assert row.cases[row.without_copies(case)].beside is None


def test_bad_words_must_change_every_request() -> None:
    row = ROWS["pull-23569"]
    (counts,) = met(row, row.cases["5 bad words"], BASE[0], [20, 21, 9]).values()
    assert counts == [1, 2]


def test_a_budget_must_be_used_up_by_every_request() -> None:
    row = ROWS["prime-rl-2772-thinking"]
    ended, endless = [1, *thinking.END, 2], [*thinking.END[:-1], 3]
    (counts,) = met(row, row.cases["presence 1.5, budget"], ended, endless).values()
    assert counts == [1, 2]


def test_nothing_is_met_where_nothing_is_asked_for() -> None:
    row = ROWS["prime-rl-2772"]
    assert met(row, row.cases["presence 1.5"], *BASE) == {}


def test_rows_share_one_engine_on_a_cpu() -> None:
    rows = [row for row in ROWS.values() if row.engine.runner == 1]
    assert len({str(row.sized("small").engine) for row in rows}) == 1


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_called_what_it_is_at_any_size(name: str) -> None:
    for row in sizes(name):
        for label, case in row.cases.items():
            if found := re.search(r"batch (\d+)", label):
                assert int(found[1]) == (case.batch or row.engine.batch)
        if not any(case.beside for case in row.cases.values()):
            assert "foreign" not in row.title
        assert row.engine.asynchronous or "Asynchronous" not in row.title


@dataclass
class Logprob:
    """What a position says of one token."""

    rank: int


def test_each_position_needs_the_token_taken_and_every_rank() -> None:
    row = ROWS["issue-43450"]
    case = Case(({"logprobs": 2}, {}))
    whole = {5: Logprob(1), 6: Logprob(2)}
    lacking = {5: Logprob(1)}
    other = {7: Logprob(1), 6: Logprob(2)}
    done = [Done([5, 5, 5], [whole, lacking, other]), Done([5, 5, 5])]
    wanted = row.output
    assert driver._count_logprobs(row, case, done, 2) == {
        "logprobs": [3, wanted],
        "positions with every logprob": [1, wanted],
    }
    unasked = driver._count_logprobs(row, Case(), [Done([5], [whole])], 1)
    assert unasked["logprobs"] == [1, 0]


def test_the_engine_takes_the_markers_without_a_tokenizer() -> None:
    config = thinking.config()
    model: Any = None
    config.initialize_token_ids(model)
    assert config.enabled
    assert config.reasoning_start_token_ids == thinking.START
    assert config.reasoning_end_token_ids == thinking.END
