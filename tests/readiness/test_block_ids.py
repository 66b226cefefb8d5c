"""The fix block-ids: what a KV cache manager holds does not grow with what it has served.

The pinned manager has the fault, which is asserted as well: with the fix off ours has it.
"""

from typing import Any

import pytest
from support.grammars import output_of
from support.scheduling import BLOCK, Setup, of_side
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

FIX = "block-ids"
#: Blocks of a request: its prompt's, and one for its outputs.
PROMPT, EACH = 7, 3
SETUP = Setup(asynchronous=False, caching=False, blocks=16)


def serve(scheduler: Any, requests: int) -> list[list[int] | None]:
    """Serve requests one after the other; the ids that the worker is to zero, by step."""
    zeroed = []
    for number in range(requests):
        params = SamplingParams(max_tokens=BLOCK, ignore_eos=True)
        scheduler.add_request(Request("r", [number] * PROMPT, params, None))
        while scheduler.requests:
            scheduled = scheduler.schedule()
            scheduler.update_from_output(scheduled, output_of(scheduled, {"r": [5]}))
            zeroed.append(scheduled.new_block_ids_to_zero)
    return zeroed


def test_ids_without_a_reader_are_not_kept(side: str) -> None:
    scheduler = of_side(side, SETUP)
    assert not any(serve(scheduler, 50))
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    held = sum(len(manager.new_block_ids) for manager in managers)
    assert held <= EACH if side == "ours" else held == 50 * EACH


def test_ids_are_still_read_where_blocks_are_zeroed(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    zeroed = serve(of_side(side, SETUP), 3)
    assert [len(ids or []) for ids in zeroed] == [2, 0, 1, 0] * 3
