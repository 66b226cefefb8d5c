"""Fix ``failed-loads``: recompute KV blocks that failed to load, and drop tokens sampled from them.

A KV connector reports the blocks that it failed to load with a step's output. With
``kv_load_failure_policy="recompute"``, 0.22.0 lowers ``num_computed_tokens`` of the running
requests that hold such blocks, and drops their tokens of that step. It does not handle

- placeholders of in-flight tokens under async scheduling: -1 reaches the embedding, and the engine
  dies (https://github.com/vllm-project/vllm/issues/45138);
- later in-flight steps, prefill chunks included: tokens sampled from missing KV are delivered;
- the prefix cache: other requests hit the bad blocks, and blocks computed from them;
- sliding windows: tokens are recomputed although their blocks have been freed.

Here each request that used bad blocks is preempted, and its in-flight output is dropped. The bad
blocks, and all blocks computed from them, are evicted from the prefix cache. The request resumes
like any preempted request, without another load. With the policy "fail", all these requests end.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._preempt_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._handle_invalid_blocks
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_requests_with_invalid_blocks
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakSet

from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.readiness.core.in_flight import InFlight
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: Scheduler methods that have a seam.
_METHODS = ("schedule", "_update_after_schedule", "update_from_output", "_handle_invalid_blocks")


@dataclass
class _Holder:
    """Blocks that a request holds, or held before a preemption or its end."""

    name: str  #: Request id.
    #: Per KV cache group, the block size in tokens, and the block ids by block index.
    groups: list[tuple[int, dict[int, int]]]
    computed: int  #: ``num_computed_tokens`` when the request was scheduled.
    current: bool = False  #: Whether the request holds these blocks now.
    bad: int | None = None  #: Position of the first token with wrong KV, if any.

    def spread(self, bad: set[int]) -> bool:
        """Add all blocks from the first bad block on to ``bad``; True if that block is new."""
        positions = [
            size * index
            for size, blocks in self.groups
            for index, block in blocks.items()
            if block in bad and size * index < self.computed
        ]
        first = min(positions, default=None)
        if first is None or (self.bad is not None and self.bad <= first):
            return False
        self.bad = first
        for size, blocks in self.groups:
            bad.update(block for index, block in blocks.items() if index >= first // size)
        return True


class FailedLoads:
    """State of the fix for one scheduler, whose steps in flight are ``in_flight``."""

    def __init__(self, scheduler: "Scheduler", in_flight: "InFlight") -> None:
        self._scheduler, self._in_flight = scheduler, in_flight
        #: The step whose output is being processed.
        self._arrived: SchedulerOutput | None = None
        #: Running requests to preempt before the next step is scheduled.
        self._to_preempt: list[Request] = []
        #: Requests with a failed load, for which the connector loads nothing more.
        self._recomputed: WeakSet[Request] = WeakSet()

    @cached_property
    def _on(self) -> bool:
        """True if the fix is on, and the scheduler has a connector and all seams."""
        return (
            self._scheduler.connector is not None
            and registry.FAILED_LOADS in switch.enabled()
            and subclasses.scheduler_has_seams(
                type(self._scheduler), _METHODS, registry.FAILED_LOADS, "failed KV loads"
            )
        )

    def refused(self, request: "Request") -> bool:
        """Return whether a waiting request may not load KV, because an earlier load failed.

        Called after the connector's lookup, in which some connectors drop old blocks.
        """
        return request in self._recomputed

    def scheduled(self, step: "SchedulerOutput") -> None:
        """Add a scheduled step to the in-flight steps, if the fix is on."""
        if self._on:
            self._in_flight.schedule(step)

    def arrive(self, step: "SchedulerOutput", output: "ModelRunnerOutput") -> None:
        """Remove dropped results from a step's output. Called before the output is processed."""
        if self._on:
            self._arrived = step
            self._in_flight.arrive(step, output)

    def preempt(self, preempted: "list[Request]", timestamp: float) -> None:
        """Preempt the requests to recompute, and add them to ``preempted``, before a step."""
        if not self._to_preempt:
            return
        scheduler = self._scheduler
        # Iterate in reverse to keep the order: each request is prepended to the waiting queue.
        for request in [item for item in reversed(scheduler.running) if item in self._to_preempt]:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, timestamp)
            preempted.append(request)
        self._to_preempt = []

    def handle(self, invalid: set[int]) -> set[str] | None:
        """Process the ids of blocks that failed to load; None to fall back to upstream.

        Returns the ids of the affected requests. The caller skips their output of the current step,
        and ends the requests if the policy is "fail".
        """
        if not self._on:
            return None
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        pool = manager.block_pool
        bad = {block for block in invalid if 0 <= block < len(pool.blocks)}
        bad.discard(pool.null_block.block_id)
        steps = [step for step in (self._arrived, *self._in_flight.steps) if step is not None]
        affected = _affected([*_holders(scheduler, steps)], bad)
        manager.evict_blocks(bad)
        requests = [
            request
            for name in affected
            if (request := scheduler.requests.get(name)) is not None and not request.is_finished()
        ]
        names = {request.request_id for request in requests}
        if not requests:
            return names
        if not scheduler.recompute_kv_load_failures:
            logger.error(
                "Failing %d request(s) because some of their KV blocks could not be loaded "
                '(kv_load_failure_policy="fail"): %s',
                *(len(names), sorted(names)),
            )
            return names
        logger.warning(
            "Recomputing %d request(s) because some of their KV blocks could not be loaded: %s",
            *(len(names), sorted(names)),
        )
        for request in requests:
            self._recompute(request, affected[request.request_id])
        return names

    def _recompute(self, request: "Request", position: int | None) -> None:
        """Drop a request's in-flight output, and prepare to recompute the request.

        ``position`` is the first token with wrong KV in the request's current blocks, if any.
        """
        self._recomputed.add(request)
        self._in_flight.drop(request.request_id, prompt_is_stale=True)
        request.num_output_placeholders = 0
        request.async_tokens_to_discard = 0
        if request.status == RequestStatus.RUNNING:
            self._to_preempt.append(request)
        elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS and position is not None:
            # Other blocks may still be loading: upstream resumes the request once they are loaded.
            alone = len(self._scheduler.kv_cache_config.kv_cache_groups) == 1
            request.num_computed_tokens = position if alone else 0
            self._scheduler.failed_recving_kv_req_ids.add(request.request_id)


def _affected(holders: list[_Holder], bad: set[int]) -> dict[str, int | None]:
    """Add all blocks computed from bad blocks to ``bad``, and find the affected requests.

    Returns request id to the first token with wrong KV in the request's current blocks, if any.
    """
    while any(holder.spread(bad) for holder in holders):
        pass
    wrong = [holder for holder in holders if holder.bad is not None]
    affected: dict[str, int | None] = {holder.name: None for holder in wrong}
    affected.update((holder.name, holder.bad) for holder in wrong if holder.current)
    return affected


def _holders(scheduler: "Scheduler", steps: "Iterable[SchedulerOutput]") -> Iterator[_Holder]:
    """Yield the KV blocks of each request that ``steps`` admitted or that holds blocks now."""
    manager = scheduler.kv_cache_manager
    sizes = [group.block_size for group in manager.coordinator.single_type_managers]
    null = manager.block_pool.null_block.block_id

    def holder(
        name: str, groups: Sequence[Sequence[int]], computed: int, current: bool = False
    ) -> _Holder:
        held = [
            {index: block for index, block in enumerate(blocks) if block != null}
            for blocks in groups
        ]
        return _Holder(name, [*zip(sizes, held, strict=True)], computed, current)

    admissions, computed = _admissions(steps)
    for name, blocks, number in admissions:
        yield holder(name, blocks, number)
    for request in scheduler.running:
        name = request.request_id
        number = computed.get(name, request.num_computed_tokens)
        yield holder(name, manager.get_block_ids(name), number, current=True)
    for request in scheduler.skipped_waiting:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            name, number = request.request_id, request.num_computed_tokens
            yield holder(name, manager.get_block_ids(name), number, current=True)


def _admissions(
    steps: "Iterable[SchedulerOutput]",
) -> tuple[list[tuple[str, list[list[int]], int]], dict[str, int]]:
    """Return the admissions of ``steps``, and each request's first number of computed tokens.

    An admission is the request id, the block ids per group, and the number of computed tokens.
    Blocks that later steps append are included: a preempted request holds none of them any more.
    """
    admissions: list[tuple[str, list[list[int]], int]] = []
    computed: dict[str, int] = {}
    latest: dict[str, list[list[int]]] = {}
    for step in steps:
        cached = step.scheduled_cached_reqs
        rows = [
            (new.req_id, new.block_ids, new.num_computed_tokens) for new in step.scheduled_new_reqs
        ]
        rows += zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        continued = {*cached.req_ids} - cached.resumed_req_ids
        for name, groups, number in rows:
            computed.setdefault(name, number)
            if groups is None:
                continue
            if name not in continued:
                latest[name] = [[*blocks] for blocks in groups]
                admissions.append((name, latest[name], number))
            elif name in latest:
                for blocks, more in zip(latest[name], groups, strict=True):
                    blocks.extend(more)
    return admissions, computed
