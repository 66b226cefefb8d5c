"""The fixes allowed-tokens and row-state: a row's values are its own request's.

The pinned class has faults here, which are asserted as well: with the fixes off ours has them.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support import modules
from support.batches import Spec, empty, pooled, state
from support.sampling import BUILTIN
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.pooler.tokwise.methods import AllPool
from vllm.v1.sample.logits_processor import LogitsProcessors

FIX = "fixes"
VOCABULARY = 16
ROWS = 6
ALLOWED = [3, 5]
FORBIDDEN = set(range(VOCABULARY)) - set(ALLOWED)

Make = Callable[..., Any]


def of_side(side: str) -> Make:
    """Return what makes a side's batches, which are empty."""
    load = modules.of_side(side)
    return partial(empty, load, VOCABULARY, max_num_reqs=ROWS, length=64)


def plain(name: str, **params: Any) -> Any:
    """A request for tokens, with two blocks."""
    request = state(Spec([1, 2], [], params), name)
    request.block_ids = ([7, 8],)
    return request


def bound(name: str) -> Any:
    """A request with allowed tokens."""
    return plain(name, allowed_token_ids=ALLOWED)


def embedded(name: str, **params: Any) -> Any:
    """A request whose prompt is two embeddings."""
    return state(Spec(None, [], params, torch.ones(2, 4)), name)


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


def rows_of_embeddings(make: Make) -> Any:
    batch = join(make(), embedded("a"), plain("b"))
    leave(batch, "a", "b")
    return [*batch.req_prompt_embeds]


def pooled_prompts(batch: Any) -> Any:
    """The prompts that a pooling model is shown; None if it needs none."""
    prompts = batch.get_pooling_metadata().prompt_token_ids
    return None if prompts is None else prompts.tolist()


def pooled_prompts_after_a_move(make: Make) -> Any:
    """The request that needs its prompt takes the row of one that does not, and the reverse."""
    shown = []
    for needs in (True, False):
        batch = make(is_pooling_model=True)
        join(batch, pooled([1, 2], "a", not needs), pooled([3, 4], "b", needs))
        leave(batch, "a")
        shown.append(pooled_prompts(batch))
    return shown


def pooled_prompts_after_a_swap(make: Make) -> Any:
    batch = join(make(is_pooling_model=True), pooled([1, 2], "a", True), pooled([3, 4], "b", False))
    batch.swap_states(0, 1)
    batch.refresh_metadata()
    shown = pooled_prompts(batch)
    leave(batch, "a")
    return shown, pooled_prompts(batch)


@pytest.mark.parametrize(
    ("outcome", "stock", "fixed"),
    [
        (masks_after_a_move, (FORBIDDEN, FORBIDDEN), (FORBIDDEN, set())),
        (masks_after_a_swap, (set(), set()), (FORBIDDEN, set())),
        (blocks_after_a_move, [[7, 8, 0], [7, 8, 0]], [[7, 8, 0], [0, 0, 0]]),
        (penalised_prompt_of_embeddings, [[1, 2]], [[0, 0]]),
        (rows_of_embeddings, [0], []),
        (pooled_prompts_after_a_move, [None, [[3, 4]]], [[[3, 4]], None]),
        (pooled_prompts_after_a_swap, ([[1, 2], [3, 4]], [[3, 4]]), ([[3, 4], [1, 2]], None)),
    ],
)
def test_a_fix_mends_stocks_row_and_can_be_switched_off(
    side: str, outcome: Callable[[Make], Any], stock: Any, fixed: Any
) -> None:
    assert outcome(of_side(side)) == (fixed if side == "ours" else stock)


def test_no_mask_is_allocated_without_allowed_tokens() -> None:
    batch = join(of_side("ours")(), plain("a"), plain("b"), plain("c"))
    batch.swap_states(0, 2)
    leave(batch, "c")
    assert batch.allowed_token_ids_mask_cpu_tensor is None
    assert batch.allowed_token_ids_mask is None


def own_processors() -> LogitsProcessors:
    """The logits processors that vLLM has, with nothing in them."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS), speculative_config=None
    )
    return LogitsProcessors([kind(config, torch.device("cpu"), False) for kind in BUILTIN])


def pool(batch: Any, computed: int, count: int) -> Any:
    """Pool ``count`` tokens of the one request with upstream's pooler; None if more follow."""
    with set_current_vllm_config(VllmConfig()):
        pooler = AllPool()
    metadata = batch.get_pooling_metadata()
    ends = torch.tensor([computed + count])
    metadata.build_pooling_cursor(np.array([count]), ends, torch.device("cpu"))
    return pooler(torch.arange(computed, computed + count).unsqueeze(1), metadata)[0]


@pytest.mark.parametrize("preempted", [True, False])
def test_the_tokens_of_a_prompt_are_pooled_once(side: str, preempted: bool) -> None:
    """It leaves the batch between two chunks: preempted, it begins anew."""
    batch = of_side(side)(is_pooling_model=True)
    request = pooled([1, 2, 3], "a", False)
    join(batch, request)
    assert pool(batch, 0, 2) is None
    leave(batch, "a")
    request.num_computed_tokens = 0 if preempted else 2
    join(batch, request)
    start = request.num_computed_tokens
    tokens = [*map(int, pool(batch, start, 3 - start))]
    assert tokens == ([0, 1, 0, 1, 2] if preempted and side != "ours" else [0, 1, 2])
