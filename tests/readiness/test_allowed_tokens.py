"""What a row holds is its own request's, however the batch is changed.

The pinned class has faults here. They are asserted, too, so that a test says when upstream
mends them; and with the feature off ours has the same ones.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, empty, pooled, state
from support.sampling import BUILTIN
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.readiness import switch
from vllm.v1.sample.logits_processor import LogitsProcessors

VOCABULARY = 16
ROWS = 6
ALLOWED = [3, 5]
FORBIDDEN = set(range(VOCABULARY)) - set(ALLOWED)

Make = Callable[..., Any]


def pinned(**named: Any) -> Any:
    """Upstream's batch, empty."""
    return empty(modules.pristine, VOCABULARY, max_num_reqs=ROWS, length=64, **named)


def ours(value: str = "on", **named: Any) -> Any:
    """Our batch, empty; ``value`` is the switch's."""
    with mock.patch.dict(os.environ, {switch.NAME: value}):
        return empty(modules.overlaid, VOCABULARY, max_num_reqs=ROWS, length=64, **named)


def off(**named: Any) -> Any:
    """Our batch with the feature off."""
    return ours("-fixes", **named)


#: Who has the faults.
FAULTY = pytest.mark.parametrize(
    ("make", "faulty"), [(pinned, True), (off, True), (ours, False)], ids=["pinned", "off", "ours"]
)


def plain(name: str, **params: Any) -> Any:
    """A request for tokens, with two blocks."""
    made = state(Spec([1, 2], [], params), name)
    made.block_ids = ([7, 8],)
    return made


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


@FAULTY
def test_a_request_in_a_row_that_was_moved_has_all_tokens(make: Make, faulty: bool) -> None:
    batch = join(make(), plain("a"), bound("b"))
    leave(batch, "a")
    join(batch, plain("c"))
    assert batch.req_ids == ["b", "c"]
    assert forbidden(batch, "b") == FORBIDDEN
    assert forbidden(batch, "c") == (FORBIDDEN if faulty else set())


@FAULTY
@pytest.mark.parametrize("rows", [(0, 1), (1, 0)])
def test_requests_that_change_places_keep_their_masks(
    make: Make, faulty: bool, rows: tuple[int, int]
) -> None:
    batch = join(make(), bound("a"), plain("b"))
    batch.swap_states(*rows)
    batch.refresh_metadata()
    assert batch.req_ids == ["b", "a"]
    masks = [forbidden(batch, name) for name in ("a", "b")]
    assert masks in ([FORBIDDEN] * 2, [set()] * 2) if faulty else masks == [FORBIDDEN, set()]


@FAULTY
def test_a_row_that_was_moved_has_no_blocks(make: Make, faulty: bool) -> None:
    batch = join(make(), plain("a"), plain("b"))
    leave(batch, "a")
    table = batch.block_table[0]
    assert table.block_table.np[0, :3].tolist() == [7, 8, 0]
    assert table.block_table.np[1, :3].tolist() == ([7, 8, 0] if faulty else [0, 0, 0])
    assert table.num_blocks_per_row[1] == (2 if faulty else 0)


@FAULTY
def test_a_request_that_leaves_takes_its_embeddings(make: Make, faulty: bool) -> None:
    batch = join(make(), embedded("a"))
    leave(batch, "a")
    join(batch, plain("b"))
    assert [*batch.req_prompt_embeds] == ([0] if faulty else [])


@FAULTY
def test_embeddings_are_not_penalised_for_tokens_of_others(make: Make, faulty: bool) -> None:
    batch = join(make(), plain("a"))
    leave(batch, "a")
    join(batch, embedded("b", presence_penalty=1.0))
    prompts = batch.sampling_metadata.prompt_token_ids.tolist()
    assert prompts == ([[1, 2, 0]] if faulty else [[0, 0, 0]])


@FAULTY
def test_a_request_is_not_moved_to_anothers_embeddings(make: Make, faulty: bool) -> None:
    batch = join(make(), embedded("a"), plain("b"))
    leave(batch, "a")
    assert batch.req_ids == ["b"]
    assert [*batch.req_prompt_embeds] == ([0] if faulty else [])


@FAULTY
def test_a_pooled_request_that_is_moved_has_its_prompt(make: Make, faulty: bool) -> None:
    batch = join(make(is_pooling_model=True), pooled([1], "a", False), pooled([2, 3], "b", True))
    leave(batch, "a")
    prompts = batch.get_pooling_metadata().prompt_token_ids
    assert (None if prompts is None else prompts.tolist()) == (None if faulty else [[2, 3]])


@FAULTY
def test_pooled_requests_that_change_places_have_their_prompts(make: Make, faulty: bool) -> None:
    batch = join(make(is_pooling_model=True), *(pooled([n], str(n), True) for n in range(3)))
    batch.swap_states(0, 2)
    batch.refresh_metadata()
    prompts = batch.get_pooling_metadata().prompt_token_ids.flatten().tolist()
    assert prompts == ([0, 1, 2] if faulty else [2, 1, 0])


def test_no_mask_is_made_for_nobody() -> None:
    batch = join(ours(), plain("a"), plain("b"), plain("c"))
    batch.swap_states(0, 2)
    leave(batch, "c")
    assert batch.allowed_token_ids_mask_cpu_tensor is None
    assert batch.allowed_token_ids_mask is None


def row_of(batch: Any, row: int) -> dict[str, Any]:
    """What a batch holds for a row, in the words of the batch."""
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
            "min_tokens": (processors["MinTokensLogitsProcessor"].min_toks.get(row) or [None])[0],
        }
    )


def faults_of(batch: Any) -> tuple[Any, ...]:
    """What the feature has its hands in, rows without a request included."""
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
    """The three batches, through the same changes, and what each request should have.

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
        """A new one."""
        name, self.added = f"r{self.added}", self.added + 1
        prompt = data.draw(st.lists(TOKENS, min_size=1, max_size=5))
        self.allowed[name] = None
        if self.pooling:
            made = pooled(prompt, name, data.draw(st.booleans()))
        else:
            params: dict[str, Any] = data.draw(PARAMS)
            if data.draw(st.integers(0, 2)) == 0:
                allowed = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
                params["allowed_token_ids"] = self.allowed[name] = allowed
            embeds = torch.ones(len(prompt), 2) if data.draw(st.integers(0, 3)) == 0 else None
            spec = Spec(None if embeds is not None else prompt, [], params, embeds)
            made = state(spec, name)
            made.output_token_ids = data.draw(st.lists(TOKENS, max_size=2))
            if data.draw(st.booleans()):
                made.generator = torch.Generator()
        made.num_computed_tokens = data.draw(st.integers(0, len(prompt)))
        made.block_ids = (data.draw(st.lists(st.integers(1, 99), max_size=4)),)
        lora = data.draw(st.integers(0, 2))
        made.lora_request = LoRARequest(f"lora{lora}", lora, "/lora") if lora else None
        return made

    def add(self, request: Any, drafts: list[int]) -> None:
        """It joins, and so it does an empty batch, to see what is its own."""
        name = request.req_id
        processors = None if self.pooling else own_processors()
        alone = pinned(is_pooling_model=self.pooling, logitsprocs=processors)
        for batch in (alone, *self.all):
            batch.add_request(request)
            batch.update_req_spec_token_ids(request, {name: drafts})
        alone.refresh_metadata()
        self.expected[name] = row_of(alone, 0)

    def remove(self, name: str) -> None:
        """It leaves."""
        for batch in self.all:
            batch.remove_request(name)
        del self.expected[name]

    def compare(self) -> None:
        """Masks and the like: ours are their rows', and without the feature as upstream's."""
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
        """The changes of a step are over: every row is its own request's in everything."""
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
@settings(max_examples=150)
@pytest.mark.parametrize("pooling", [False, True])
def test_every_row_is_its_own_requests_always(pooling: bool, data: st.DataObject) -> None:
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
