"""The fix mamba-blocks: with drafts, Mamba blocks match the tokens that are computed."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

COORDINATOR = "vllm/v1/core/kv_cache_coordinator.py"
MANAGERS = "vllm/v1/core/single_type_kv_cache_manager.py"
FIX = "mamba-blocks"
BLOCK = 4
DRAFTS = 3
TOTAL = 32


def mamba() -> MambaSpec:
    """The Mamba group."""
    return MambaSpec(
        block_size=BLOCK,
        shapes=((1,),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=DRAFTS,
    )


class Group:
    """A side's manager of a Mamba group, and one request of it."""

    def __init__(self, side: str) -> None:
        load = modules.of_side(side)
        self.pool = BlockPool(num_gpu_blocks=TOTAL, enable_caching=True, hash_block_size=BLOCK)
        self.manager: Any = load(MANAGERS).MambaManager(
            mamba(),
            self.pool,
            enable_caching=True,
            kv_cache_group_id=0,
            dcp_world_size=1,
            pcp_world_size=1,
        )

    def step(self, computed: int, scheduled: int) -> tuple[int, list[int]]:
        """Allocate blocks for a step; the number that was announced, and the ids of new ones."""
        end = computed + scheduled
        self.manager.remove_skipped_blocks("a", computed)
        announced = self.manager.get_num_blocks_to_allocate("a", end, [], computed, end)
        blocks = self.manager.allocate_new_blocks("a", end, end)
        return announced, [block.block_id for block in blocks]

    def held(self) -> list[int]:
        """Ids of the request's blocks, 0 for none."""
        return [block.block_id for block in self.manager.req_to_blocks["a"]]


def test_rejected_drafts_leave_blocks_behind(side: str) -> None:
    group = Group(side)
    assert group.step(0, 3)[0] == 1 + DRAFTS
    assert group.step(3, 1 + DRAFTS)[0] == 1  # over the end of the block
    held = group.held()
    if side != "ours":
        with pytest.raises(AssertionError, match="num_required_blocks"):
            group.step(4, 0)  # all rejected, and no room for a draft
        return
    assert group.step(4, 0) == (0, [])
    assert group.held() == held
    assert group.step(4, 1 + DRAFTS) == (0, [])
    group.manager.free("a")
    assert group.pool.get_num_free_blocks() == TOTAL - 1


@given(st.lists(st.tuples(st.integers(0, DRAFTS), st.integers(0, DRAFTS)), max_size=12))
@draws(100)
def test_blocks_are_where_the_worker_looks(steps: list[tuple[int, int]]) -> None:
    """The worker's running state is in the last block of the step's tokens, drafts behind it."""
    group = Group("ours")
    group.step(0, 3)
    computed = 3
    for drafts, accepted in steps:
        before = [block for block in group.held() if block]
        announced, new = group.step(computed, 1 + drafts)
        fresh = {*new} - {*before} - {0}
        assert len(fresh) == announced
        running = -(-(computed + 1 + drafts) // BLOCK) - 1
        states = group.held()[running : running + 1 + DRAFTS]
        assert len({*states} - {0}) == 1 + DRAFTS
        computed += 1 + min(drafts, accepted)
    group.manager.free("a")
    assert group.pool.get_num_free_blocks() == TOTAL - 1


@pytest.mark.parametrize("eagle", [False, True])
def test_a_cached_prefix_has_all_its_blocks(side: str, eagle: bool) -> None:
    load = modules.of_side(side)
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["m"], mamba())]
    coordinator = load(COORDINATOR).HybridKVCacheCoordinator(
        kv_cache_config=KVCacheConfig(TOTAL, [], groups),
        max_model_len=64,
        max_num_batched_tokens=64,
        use_eagle=eagle,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        hash_block_size=BLOCK,
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompt = [*range(3 * BLOCK + 1)]
    request = Request("a", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    for blocks in (1, 2, 3):  # a chunk each, so that each has a state
        coordinator.remove_skipped_blocks("a", (blocks - 1) * BLOCK)
        coordinator.allocate_new_blocks("a", blocks * BLOCK, blocks * BLOCK)
        coordinator.cache_blocks(request, blocks * BLOCK)
    found, length = coordinator.find_longest_cache_hit(request.block_hashes, len(prompt) - 1)
    lengths = {len(blocks) * BLOCK for blocks in found}
    right = (2 if eagle else 3) * BLOCK
    assert ((lengths, length) == ({right}, right)) == (side == "ours" or not eagle)
