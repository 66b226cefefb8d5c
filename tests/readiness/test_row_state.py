"""The fixes allowed-tokens and row-state: a row's values are its own request's.

The pinned class has faults here, which are asserted as well: with the fixes off ours has them.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, empty, pooled, state
from support.examples import draws
from support.sampling import BUILTIN
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.pooler.tokwise.methods import AllPool
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.readiness.engine import switch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

VOCABULARY = 16
ROWS = 6
ALLOWED = [3, 5]
FORBIDDEN = set(range(VOCABULARY)) - set(ALLOWED)

Make = Callable[..., Any]


def pinned(**named: Any) -> Any:
    """Upstream's batch, empty."""
    return empty(modules.pristine, VOCABULARY, max_num_reqs=ROWS, length=64, **named)


def ours(value: str = "on", **named: Any) -> Any:
    """Our batch, empty; ``value`` is that of VLLM_READINESS."""
    with mock.patch.dict(os.environ, {switch.NAME: value}):
        return empty(modules.overlaid, VOCABULARY, max_num_reqs=ROWS, length=64, **named)


def off(**named: Any) -> Any:
    """Our batch with the fixes off."""
    return ours("-fixes", **named)


def plain(name: str, **params: Any) -> Any:
    """A request for tokens, with two blocks."""
    request = state(Spec([1, 2], [], params), name)
    request.block_ids = ([7, 8],)
    return request


def bound(name: str) -> Any:
    """A request with allowed tokens."""
    return plain(name, allowed_token_ids=ALLOWED)


def embedded(name: str, **params: Any) -> Any:
    """A request whose prompt is embeddings."""
    return state(Spec(None, [], params, torch.ones(3, 4)), name)


def leave(batch: Any, *names: str) -> None:
    """Requests leave, and the batch is condensed and refreshed."""
    for name in names:
        batch.remove_request(name)
    batch.condense()
    batch.refresh_metadata()


def join(batch: Any, *requests: Any) -> Any:
    """Requests join, and the batch is refreshed; the batch."""
    for request in requests:
        batch.add_request(request)
    batch.condense()
    batch.refresh_metadata()
    return batch


def forbidden(batch: Any, name: str) -> set[int]:
    """The tokens that the sampler will not give a request."""
    mask = batch.sampling_metadata.allowed_token_ids_mask
    row = batch.req_id_to_index[name]
    return set() if mask is None else set(mask[row].nonzero().flatten().tolist())


# Each returns values of a batch in which rows were moved or exchanged.


def masks_after_a_move(make: Make) -> Any:
    batch = join(make(), plain("a"), bound("b"))
    leave(batch, "a")
    join(batch, plain("c"))
    return forbidden(batch, "b"), forbidden(batch, "c")


def masks_after_a_swap(make: Make) -> Any:
    batch = join(make(), bound("a"), plain("b"))
    batch.swap_states(0, 1)
    batch.refresh_metadata()
    return forbidden(batch, "a"), forbidden(batch, "b")


def blocks_after_a_move(make: Make) -> Any:
    batch = join(make(), plain("a"), plain("b"))
    leave(batch, "a")
    return batch.block_table[0].block_table.np[:2, :3].tolist()


def penalised_prompt_of_embeddings(make: Make) -> Any:
    batch = join(make(), plain("a"))
    leave(batch, "a")
    join(batch, embedded("b", presence_penalty=1.0))
    return batch.sampling_metadata.prompt_token_ids.tolist()


@pytest.mark.parametrize(
    ("outcome", "stock", "fixed"),
    [
        (masks_after_a_move, (FORBIDDEN, FORBIDDEN), (FORBIDDEN, set())),
        (masks_after_a_swap, (set(), set()), (FORBIDDEN, set())),
        (blocks_after_a_move, [[7, 8, 0], [7, 8, 0]], [[7, 8, 0], [0, 0, 0]]),
        (penalised_prompt_of_embeddings, [[1, 2, 0]], [[0, 0, 0]]),
    ],
)
def test_a_fix_mends_stocks_row_and_can_be_switched_off(
    outcome: Callable[[Make], Any], stock: Any, fixed: Any
) -> None:
    assert outcome(pinned) == outcome(off) == stock
    assert outcome(ours) == fixed


def test_no_mask_is_allocated_without_allowed_tokens() -> None:
    batch = join(ours(), plain("a"), plain("b"), plain("c"))
    batch.swap_states(0, 2)
    leave(batch, "c")
    assert batch.allowed_token_ids_mask_cpu_tensor is None
    assert batch.allowed_token_ids_mask is None


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """Return the values that a batch holds for a row."""
    tokens = slice(batch.num_tokens_no_spec[row] + len(batch.spec_token_ids[row]))
    mask = batch.allowed_token_ids_mask_cpu_tensor
    table = batch.block_table[0]
    arrays = (
        *("num_tokens_no_spec", "num_prompt_tokens", "num_computed_tokens_cpu"),
        *("request_lora_mapping", "logits_processing_needs_token_ids"),
    )
    held = {name: getattr(batch, name)[row].item() for name in arrays} | {
        "tokens": batch.token_ids_cpu[row, tokens].tolist(),
        "are tokens": batch.is_token_ids[row, tokens].tolist(),
        "drafts": list(batch.spec_token_ids[row]),
        "embeddings": id(batch.req_prompt_embeds.get(row)),
        "blocks": table.block_table.np[row, : table.num_blocks_per_row[row]].tolist(),
    }
    if batch.is_pooling_model:
        return held
    processors = {type(each).__name__: each for each in batch.logitsprocs.all}
    min_tokens = next(p for p in processors.values() if isinstance(p, MinTokensLogitsProcessor))
    numbers = (
        *("temperature_cpu", "top_p_cpu", "top_k_cpu", "num_accepted_tokens_cpu"),
        *("frequency_penalties_cpu", "presence_penalties_cpu", "repetition_penalties_cpu"),
    )
    return (
        held
        | {name: getattr(batch, name)[row].item() for name in numbers}
        | {
            "mask": [] if mask is None else mask[row].nonzero().flatten().tolist(),
            "output": id(batch.req_output_token_ids[row]),
            "generator": id(batch.generators.get(row)),
            "bad-words": batch.bad_words_token_ids.get(row),
            "logprobs of": (batch.sampling_metadata.logprob_token_ids or {}).get(row),
            "min_p": processors["MinPLogitsProcessor"].min_p_cpu[row].item(),
            "biases": processors["LogitBiasLogitsProcessor"].biases.get(row),
            "min_tokens": (min_tokens.min_toks.get(row) or [None])[0],
        }
    )


def faults_of(batch: Any) -> tuple[Any, ...]:
    """Return what the fixes change, rows without a request included."""
    mask = batch.allowed_token_ids_mask_cpu_tensor
    table = batch.block_table[0]
    return (
        None if mask is None else mask.tolist(),
        {row: id(embeds) for row, embeds in batch.req_prompt_embeds.items()},
        batch.logits_processing_needs_token_ids.tolist(),
        batch.token_ids_cpu.tolist(),
        (table.block_table.np.tolist(), table.num_blocks_per_row.tolist()),
    )


TOKENS = st.integers(0, VOCABULARY - 1)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.5, 1.0]),
        "top_p": st.just(0.5),
        "top_k": st.just(3),
        "min_p": st.just(0.25),
        "presence_penalty": st.just(1.0),
        "frequency_penalty": st.just(0.5),
        "repetition_penalty": st.just(2.0),
        "logit_bias": st.just({2: 4.0}),
        "min_tokens": st.just(2),
        "logprob_token_ids": st.just([1, 4]),
        "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=2), min_size=1, max_size=2),
    },
)


def own_processors() -> LogitsProcessors:
    """The logits processors that vLLM has, with nothing in them."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS), speculative_config=None
    )
    return LogitsProcessors([kind(config, torch.device("cpu"), False) for kind in BUILTIN])


class Batches:
    """Three batches through the same changes, and the values that each request should have.

    Args:
        pooling: of a model that pools.
    """

    def __init__(self, pooling: bool) -> None:
        self.pooling = pooling
        self.pinned, self.off, self.ours = self.all = [
            make(is_pooling_model=pooling, logitsprocs=None if pooling else own_processors())
            for make in (pinned, off, ours)
        ]
        self.expected: dict[str, dict[str, Any]] = {}
        self.allowed: dict[str, list[int] | None] = {}
        self.added = 0

    def request(self, data: st.DataObject) -> Any:
        """Draw a new request."""
        name, self.added = f"r{self.added}", self.added + 1
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=5))
        self.allowed[name] = None
        if self.pooling:
            request = pooled(prompt, name, data.draw(st.booleans()))
        else:
            params: dict[str, Any] = data.draw(PARAMS)
            if data.draw(st.integers(0, 2)) == 0:
                allowed = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
                params["allowed_token_ids"] = self.allowed[name] = allowed
            embeds = torch.ones(len(prompt), 2) if data.draw(st.integers(0, 3)) == 0 else None
            spec = Spec(None if embeds is not None else prompt, [], params, embeds)
            request = state(spec, name)
            request.output_token_ids = data.draw(st.lists(TOKENS, max_size=2))
            if data.draw(st.booleans()):
                request.generator = torch.Generator()
        request.num_computed_tokens = data.draw(st.integers(0, len(prompt)))
        request.block_ids = (data.draw(st.lists(st.integers(1, 99), max_size=4)),)
        lora = data.draw(st.integers(0, 2))
        request.lora_request = LoRARequest(f"lora{lora}", lora, "/lora") if lora else None
        return request

    def add(self, request: Any, drafts: list[int]) -> None:
        """Add a request, also to an empty batch, which shows its own values."""
        name = request.req_id
        processors = None if self.pooling else own_processors()
        alone = pinned(is_pooling_model=self.pooling, logitsprocs=processors)
        for batch in (alone, *self.all):
            batch.add_request(request)
            batch.update_req_spec_token_ids(request, {name: drafts})
        alone.refresh_metadata()
        self.expected[name] = row_of(alone, 0)

    def remove(self, name: str) -> None:
        """Remove a request."""
        for batch in self.all:
            batch.remove_request(name)
        del self.expected[name]

    def compare(self) -> None:
        """Check what the fixes change: by row with them, and against upstream without them."""
        assert faults_of(self.off) == faults_of(self.pinned)
        mask = self.ours.allowed_token_ids_mask_cpu_tensor
        rows = [] if mask is None else mask.tolist()
        for row, held in enumerate(rows):
            name = self.ours.req_ids[row] if row < len(self.ours.req_ids) else None
            allowed = self.allowed[name] if name else None
            assert held == [allowed is not None and n not in allowed for n in range(VOCABULARY)]
        embeds = {row for row, name in enumerate(self.ours.req_ids) if name and self._embedded(row)}
        assert {*self.ours.req_prompt_embeds} == embeds
        table = self.ours.block_table[0].block_table.np
        for row in range(self.ours.num_reqs, ROWS):
            assert row < len(self.ours.req_ids) or not table[row].any()

    def refresh(self) -> None:
        """End the changes of a step, and check every value of every row."""
        for batch in self.all:
            batch.refresh_metadata()
        for name, row in self.ours.req_id_to_index.items():
            assert row_of(self.ours, row) == self.expected[name]
        metadata = self.ours.sampling_metadata
        if self.pooling:
            pooled_ = self.ours.get_pooling_metadata()
            prompts = pooled_.prompt_token_ids
            needed = any(params.requires_token_ids for params in pooled_.pooling_params)
            assert (prompts is not None) == needed
            if needed:
                assert torch.equal(prompts, pooled_.prompt_token_ids_cpu)
            return
        mask = metadata.allowed_token_ids_mask
        assert (mask is None) == all(self.allowed[name] is None for name in self.expected)
        if mask is not None:
            assert torch.equal(mask, self.ours.allowed_token_ids_mask_cpu_tensor[: len(mask)])
            assert len(mask) == self.ours.num_reqs

    def _embedded(self, row: int) -> bool:
        length = self.ours.num_prompt_tokens[row]
        return not self.ours.is_token_ids[row, :length].any()


@given(data=st.data())
@draws(50)
@pytest.mark.parametrize("pooling", [False, True])
def test_every_row_is_its_own_requests_after_any_changes(
    pooling: bool, data: st.DataObject
) -> None:
    """Requests leave and join, rows are moved, exchanged and reordered, as the runner does."""
    batches = Batches(pooling)
    for _ in range(data.draw(st.integers(1, 8))):
        present = sorted(batches.expected)
        for name in present:
            if data.draw(st.integers(0, 2)) == 0:
                batches.remove(name)
                batches.compare()
        for _ in range(data.draw(st.integers(0, ROWS - len(batches.expected)))):
            drafts = [] if pooling else data.draw(st.lists(TOKENS, max_size=2))
            batches.add(batches.request(data), drafts)
            batches.compare()
        for batch in batches.all:
            batch.condense()
        batches.compare()
        rows = st.integers(0, max(0, len(batches.expected) - 1))
        for one, other in data.draw(st.lists(st.tuples(rows, rows), max_size=2)):
            for batch in batches.all if one != other else ():
                batch.swap_states(one, other)
            batches.compare()
        if data.draw(st.booleans()) and batches.expected:
            counts = {name: data.draw(st.integers(1, 3)) for name in batches.expected}
            for batch in batches.all:
                scheduled: Any = SimpleNamespace(num_scheduled_tokens=counts)
                reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
            batches.compare()
        batches.refresh()


def pool(batch: Any, computed: int, count: int) -> Any:
    """Pool ``count`` tokens of the one request with upstream's pooler; None if more follow."""
    with set_current_vllm_config(VllmConfig()):
        pooler = AllPool()
    metadata = batch.get_pooling_metadata()
    ends = torch.tensor([computed + count])
    metadata.build_pooling_cursor(np.array([count]), ends, torch.device("cpu"))
    return pooler(torch.arange(computed, computed + count).unsqueeze(1), metadata)[0]


@pytest.mark.parametrize("preempted", [True, False])
def test_the_tokens_of_a_prompt_are_pooled_once(preempted: bool) -> None:
    """It leaves the batch between two chunks: preempted, it begins anew."""

    def pooled_tokens(make: Make) -> list[int]:
        batch = make(is_pooling_model=True)
        request = pooled([1, 2, 3], "a", False)
        join(batch, request)
        assert pool(batch, 0, 2) is None
        leave(batch, "a")
        request.num_computed_tokens = 0 if preempted else 2
        join(batch, request)
        start = request.num_computed_tokens
        return [*map(int, pool(batch, start, 3 - start))]

    stock = [0, 1, 0, 1, 2] if preempted else [0, 1, 2]
    assert pooled_tokens(pinned) == pooled_tokens(off) == stock
    assert pooled_tokens(ours) == [0, 1, 2]
