"""What the benchmark of the engine asks of requests, and how it sees that they met it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from bench import measure, thinking
from bench.rows import BASELINE, ROWS, Row

PLAIN = [[10, 11, 12], [20, 21, 22]]


@dataclass
class Done:
    """A completion."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None = None


def met(row: Row, case: str, *given: list[int]) -> dict[str, list[int]]:
    engine: Any = SimpleNamespace(row=replace(row, batch=len(given)), plain=PLAIN)
    return measure._met(engine, row.cases[case], [Done(tokens) for tokens in given])


def test_words_are_the_tokens_one_after_the_other() -> None:
    assert measure.words([1, 2, 3, 4, 5, 6, 7], (3, 1, 2)) == [[1, 2, 3], [4], [5, 6]]


@pytest.mark.parametrize("name", ROWS)
def test_the_baseline_is_first_and_has_tokens_for_every_word(name: str) -> None:
    for row in (ROWS[name], ROWS[name].tiny()):
        assert next(iter(row.cases)) == BASELINE
        for parameters in row.cases.values():
            assert sum(parameters.get("bad_words", ())) <= row.output
            assert row.thinking or "thinking_token_budget" not in parameters


def test_bad_words_must_change_every_request() -> None:
    (counts,) = met(ROWS["bad-words"], "5 words", PLAIN[0], [20, 21, 9]).values()
    assert counts == [1, 2]


def test_a_budget_must_be_used_up_by_every_request_that_is_long_enough() -> None:
    ended, endless = [1, *thinking.END, 2], [*thinking.END[:-1], 3]
    (counts,) = met(ROWS["thinking"], "budget 1500", ended, endless).values()
    assert counts == [1, 2]
    (counts,) = met(ROWS["thinking"].tiny(), "budget 1500", endless, endless).values()
    assert counts == [0, 0]


@pytest.mark.parametrize("name", ["thinking", "thinking-4096"])
def test_the_rows_are_long_enough_to_use_the_budget_up(name: str) -> None:
    row = ROWS[name]
    (budget,) = (p["thinking_token_budget"] for p in row.cases.values() if p)
    assert budget + len(thinking.END) <= row.output
    assert row.prompt + row.output <= row.length


def test_nothing_is_met_where_nothing_is_asked_for() -> None:
    assert met(ROWS["half-b"], "presence", *PLAIN) == {}


def test_the_engine_takes_the_markers_without_a_tokenizer() -> None:
    config = thinking.config()
    model: Any = None
    config.initialize_token_ids(model)
    assert config.enabled
    assert config.reasoning_start_token_ids == thinking.START
    assert config.reasoning_end_token_ids == thinking.END
