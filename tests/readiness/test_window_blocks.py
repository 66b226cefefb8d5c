"""The fix window-blocks: a request attends to its own keys and values only.

The pinned manager has the fault, which is asserted as well: with the fix off ours has it.
"""

import random
from typing import Any

import pytest
from support import modules
from support.scheduling import BLOCK, Setup, make
from support.steps import Steps
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as upstream_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import ModelRunnerOutput

MANAGER = "vllm/v1/core/kv_cache_manager.py"
FIX = "window-blocks"
WINDOW = 6
DRAFTS = 3
#: So few that a block which is given back is soon another request's.
BLOCKS = 14
#: Groups of :data:`support.scheduling.GROUPS`.
SPECS = ["sliding", "chunked"]


def first_in_window(spec: str, position: int) -> int:
    """The first position that a token attends to."""
    return max(0, position - WINDOW + 1) if spec == "sliding" else position // 8 * 8


class Device(Steps):
    """Runs steps over one layer's KV cache, in which each slot names its request and position.

    Attributes:
        foreign: slots of other requests that a request attended to, as (reader, owner).
        free: number of free blocks before each step.
    """

    def __init__(self, scheduler: Any, spec: str, accepting: float) -> None:
        super().__init__(scheduler)
        self.spec, self.accepting = spec, accepting
        self.chance = random.Random(4)
        self.blocks: dict[str, list[int]] = {}
        self.at: dict[str, int] = {}
        self.known: dict[str, int] = {}
        self.slots: dict[int, tuple[str, int]] = {}
        self.foreign: list[tuple[str, str]] = []
        self.free: list[int] = []

    def run(self, requests: int) -> None:
        """Run requests that come one by one, with two steps in flight."""
        for step in range(400):
            if step % 4 == 0 and step // 4 < requests:
                prompt = self.chance.randint(3, 12)
                name = self.add(prompt, self.chance.randint(20, 40))
                self.known[name] = prompt
            self.free.append(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
            self.step()
        assert not self.scheduler.requests

    def _run(self, scheduled: Any) -> ModelRunnerOutput:
        """Write what each request computes, and let it attend to its window."""
        for new in scheduled.scheduled_new_reqs:
            (self.blocks[new.req_id],) = map(list, new.block_ids)
            self.at[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for name, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.blocks[name], self.at[name] = [], computed
            self.blocks[name] += ids[0] if ids else []
        counts = scheduled.num_scheduled_tokens
        for name, count in counts.items():
            for position in range(self.at[name], self.at[name] + count):
                self.slots[self.slot(name, position)] = (name, position)
        sampled = [self.attend(name, scheduled) for name in counts]
        rows = {name: row for row, name in enumerate(counts)}
        return ModelRunnerOutput([*counts], rows, sampled)

    def slot(self, name: str, position: int) -> int:
        """Where a request's position lies."""
        return self.blocks[name][position // BLOCK] * BLOCK + position % BLOCK

    def attend(self, name: str, scheduled: Any) -> list[int]:
        """Read the windows of a request's positions, and sample."""
        count = scheduled.num_scheduled_tokens[name]
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        # What a draft that is rejected attends to does not matter.
        accepted = sum(self.chance.random() < self.accepting for _ in range(drafts))
        end = self.at[name] + count - drafts + accepted
        for position in range(self.at[name], end):
            for earlier in range(first_in_window(self.spec, position), position + 1):
                owner = self.slots[self.slot(name, earlier)]
                if owner != (name, earlier):
                    self.foreign.append((name, owner[0]))
        self.at[name] = end
        if end < self.known[name]:
            return []
        self.known[name] += 1 + accepted
        return [5] * (1 + accepted)


def ran(
    side: str, monkeypatch: pytest.MonkeyPatch, spec: str = "sliding", drafts: int = DRAFTS
) -> Device:
    """Run requests with a side's KV cache manager."""
    manager = KVCacheManager if side == "pinned" else modules.overlaid(MANAGER).KVCacheManager
    monkeypatch.setattr(upstream_scheduler, "KVCacheManager", manager)
    setup = Setup(
        caching=False, groups=spec, blocks=BLOCKS, seqs=8, budget=32, length=64, drafts=drafts
    )
    scheduler = make(setup, AsyncScheduler)
    device = Device(scheduler, spec, accepting=0.4)
    device.run(30)
    return device


@pytest.mark.parametrize("spec", SPECS)
def test_a_request_attends_to_its_own_tokens(
    side: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = ran(side, monkeypatch, spec).foreign
    if side == "ours":
        assert not foreign
    else:
        assert any(reader != owner for reader, owner in foreign)


def test_without_drafts_blocks_are_given_back_as_early(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ran("ours", monkeypatch, drafts=0)
    assert not ours.foreign
    assert ours.free == ran("pinned", monkeypatch, drafts=0).free
