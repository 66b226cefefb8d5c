"""Thinking budgets beside upstream's, and when they wait.

A :class:`support.lives.Life` compares ours with upstream's after every step.
"""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support.lives import DRAFTED, Life, SetAside
from vllm.v1.readiness import fences
from vllm.v1.readiness.history import PLACEHOLDER
from vllm.v1.readiness.thinking_budget import ThinkingBudget
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

MARKED = st.sampled_from(range(DRAFTED))
MARKER = st.lists(MARKED, min_size=1, max_size=3)


@given(data=st.data())
@settings(max_examples=40)
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_decision_is_upstreams(drafts: int, asynchronous: bool, data: st.DataObject) -> None:
    """Any markers, budgets, drafts, cuts and delays, of requests that come, leave and move."""
    draw = data.draw
    chance = random.Random(draw(st.integers(0, 1000)))
    life = Life(
        draw(st.integers(0, 1000)),
        asynchronous,
        drafts,
        max_num_seqs=3,
        markers=draw(st.tuples(MARKER, MARKER)),
        reorder_threshold=1 + drafts,
        arrives=lambda: chance.random() < 0.5,
    )
    req_ids = []
    try:
        for _ in range(draw(st.integers(3, 24))):
            event = draw(
                st.sampled_from(["join", "join", "join", "abort", "cut", "cut", *[""] * 9])
            )
            if event == "join":
                req_ids.append(
                    life.add(
                        draw(st.lists(MARKED, min_size=1, max_size=5)),
                        thinking_token_budget=draw(
                            st.sampled_from([None, -1, 0, 1, 2, 3, 4, 6, 9, 30])
                        ),
                        max_tokens=draw(st.integers(1, 30)),
                    )
                )
            elif event and req_ids:
                req_id = draw(st.sampled_from(req_ids))
                if event == "abort":
                    life.abort(req_id)
                else:
                    life.cuts[req_id] = draw(st.integers(1, 4))
            life.step()
        life.finish()
    except SetAside:
        reject()


class Counting(list[int]):
    """An output that counts the tokens that are read of it in slices."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        tokens = super().__getitem__(index)
        if isinstance(index, slice):
            self.read += len(tokens)
        return tokens


@pytest.mark.parametrize("prompt", [[2], [0]])
@pytest.mark.parametrize("budget", [3, 10_000])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_reads_only_new_tokens(asynchronous: bool, budget: int, prompt: list[int]) -> None:
    """The cost depends neither on the output's length nor on whether a marker is found."""
    output = Counting([2] * 500)
    batch: Any = SimpleNamespace(req_output_token_ids=[output], spec_token_ids=[[]])
    history: Any = SimpleNamespace(
        drafted=False, known=lambda _: len(output) - (output[-1] == PLACEHOLDER)
    )
    markers = SimpleNamespace(reasoning_start_token_ids=[0, 1], reasoning_end_token_ids=[1, 1, 0])
    holder = ThinkingBudgetStateHolder(markers, 16, 0, torch.device("cpu"), False)
    ours = ThinkingBudget(batch, history, holder)
    params = SimpleNamespace(thinking_token_budget=budget)
    ours.sync_batch(BatchUpdate(1, [], [(0, params, prompt, [*output])], []))
    ours.update_state([output], [[]])
    output.read = 0
    for _ in range(200):
        output.append(PLACEHOLDER if asynchronous else 3)
        ours.update_state([output], [[]])
        if asynchronous:
            output[-1] = 3
            ours.arrive([0], [3])
    assert output.read <= 3 * 200


def waits_of(life: Life) -> dict[str, int]:
    """How often the host waits from here to the end of a life, by owner."""
    before = dict(fences.counts())
    life.finish()
    return {
        name: count - before.get(name, 0)
        for name, count in fences.counts().items()
        if count > before.get(name, 0)
    }


@pytest.mark.parametrize(("end", "budget"), [([35], 20), ([35, 36, 34], 12)])
def test_only_a_step_that_may_force_waits(end: list[int], budget: int) -> None:
    """One for the first token of the end marker, and one for what follows each token."""
    life = Life(markers=([36], end))
    life.add([36], thinking_token_budget=budget, max_tokens=40, ignore_eos=True)
    assert waits_of(life) == {"thinking-budget": 1 + len(end)}
    assert life.stock.waits > 30


def test_a_long_budget_waits_for_its_last_few_tokens_alone() -> None:
    """Under asynchronous scheduling, where every token is late."""
    life = Life(markers=([36], [35, 34]), max_num_seqs=2, num_blocks=200, max_model_len=256)
    for _ in range(2):
        life.add(
            [36],
            thinking_token_budget=128,
            max_tokens=160,
            ignore_eos=True,
            logit_bias={35: -100.0},
        )
    before = fences.counts().get("thinking-budget", 0)
    life.finish()
    assert fences.counts()["thinking-budget"] - before == 3
    assert life.stock.waits == life.steps - 1 == 159


@pytest.mark.parametrize(
    ("markers", "prompt"),
    [
        (([36], [35]), [36, 35]),  # thinking is over
        (([36, 35, 36], [34]), [1]),  # it has not begun, and the budget outlasts tokens in flight
    ],
)
def test_without_thinking_nothing_waits(
    markers: tuple[list[int], list[int]], prompt: list[int]
) -> None:
    life = Life(markers=markers)
    life.add(prompt, thinking_token_budget=3, max_tokens=40)
    assert waits_of(life) == {}


@pytest.mark.parametrize("processor", [None, "user"])
def test_processors_wait_only_where_a_user_s_is_there(processor: str | None) -> None:
    """Upstream takes it that a thinking budget is a logits processor that reads tokens."""
    life = Life(markers=([36], [35]), processor=processor)
    life.add([1], max_tokens=20)
    assert bool(waits_of(life)) == bool(processor)


def test_switched_off_upstream_waits_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-thinking-budget")
    life = Life(markers=([36], [35]))
    life.add([36], thinking_token_budget=9, max_tokens=20)
    assert type(life.ours.batch.thinking_budget_state_holder) is ThinkingBudgetStateHolder
    waits = waits_of(life)
    assert waits["logits-processors"] + waits.get("thinking-budget", 0) > 15
