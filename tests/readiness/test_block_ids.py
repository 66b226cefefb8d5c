"""The fix block-ids: what a KV cache manager holds does not grow with what it has served.

The pinned manager has the fault, which is asserted as well: with the fix off ours has it.
"""

from typing import Any

import pytest
from support import modules
from support import scheduling as upstream
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as upstream_scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

MANAGER = "vllm/v1/core/kv_cache_manager.py"
FIX = "block-ids"
#: Blocks of a request: its prompt's, and one for its outputs.
PROMPT, EACH = 7, 3


def make_scheduler(side: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a scheduler with a side's KV cache manager."""
    manager = KVCacheManager if side == "pinned" else modules.overlaid(MANAGER).KVCacheManager
    monkeypatch.setattr(upstream_scheduler, "KVCacheManager", manager)
    return upstream.make_scheduler(False, None, 16, 4, 64, 64)


def step(scheduler: Any) -> Any:
    """Schedule a step and give each request a token; what was scheduled."""
    scheduled = scheduler.schedule()
    names = list(scheduled.num_scheduled_tokens)
    rows = {name: row for row, name in enumerate(names)}
    scheduler.update_from_output(scheduled, ModelRunnerOutput(names, rows, [[5] for _ in names]))
    return scheduled


def serve(scheduler: Any, requests: int) -> list[list[int] | None]:
    """Serve requests one after the other; the ids that the worker is to zero, by step."""
    zeroed = []
    for number in range(requests):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        prompt = list(range(3, 3 + PROMPT))
        scheduler.add_request(Request(f"r{number}", prompt, params, None))
        while scheduler.requests:
            zeroed.append(step(scheduler).new_block_ids_to_zero)
    return zeroed


def held(scheduler: Any) -> int:
    """The number of block ids that the scheduler's managers hold."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return sum(len(manager.new_block_ids) for manager in managers)


def test_ids_that_nobody_reads_are_not_kept(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(side, monkeypatch)
    zeroed = serve(scheduler, 50)
    assert not any(zeroed)
    if side == "ours":
        assert held(scheduler) <= EACH
    else:
        assert held(scheduler) == 50 * EACH


def test_ids_are_still_read_where_blocks_are_zeroed(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    scheduler = make_scheduler(side, monkeypatch)
    zeroed = serve(scheduler, 3)
    assert [len(ids or []) for ids in zeroed] == [2, 0, 1, 0] * 3
