"""Feature ``schedule``: schedule the running requests that continue all at once.

In each step, 0.22.0 loops over the running requests, allocates slots, fills the scheduler's output
and advances counts. With 128 requests this takes about 0.9 ms, although nearly all of the requests
add one token and their drafts to a block that they already hold. Here each request has bounds
(:mod:`bounds`). Requests below their bounds are scheduled together. One that needs a block gets it
in upstream's order, from upstream's KV cache manager, or where that would do no more, from its only
group's. Upstream's loop schedules all other running requests, and upstream's code handles arrivals,
preemptions and resumptions. No list or dict is shared between the outputs of two steps, but
upstream's list of draft placeholders.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler.schedule
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule
# mirrors: vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, compress, islice
from operator import add, ge, ne, sub
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import bounds, records
from vllm.v1.readiness.engine import gauges

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.readiness.core.lora_limits import LoraLimits
    from vllm.v1.request import Request

_SKIPPED = bounds.Skipped(
    functions=("CachedRequestData", "record_function_or_nullcontext"),
    scheduler=(
        "_mamba_block_aligned_split",
        "_make_cached_request_data",
        "_update_after_schedule",
    ),
    manager=("allocate_slots", "create_kv_cache_blocks"),
    coordinator=(
        "allocate_new_blocks",
        "cache_blocks",
        "get_num_blocks_to_allocate",
        "remove_skipped_blocks",
    ),
    group=(
        "_get_num_evictable_blocks",
        "allocate_new_blocks",
        "cache_blocks",
        "get_num_blocks_to_allocate",
        "get_num_skipped_tokens",
        "remove_skipped_blocks",
    ),
    pool=("get_num_free_blocks",),
    request=(
        "has_encoder_inputs",
        "num_encoder_inputs",
        "num_output_tokens",
        "num_tokens",
        "num_tokens_with_spec",
        "use_structured_output",
    ),
    blocks=("get_block_ids",),
    manager_functions=("KVCacheBlocks",),
    group_functions=("cdiv",),
)


class Running:
    """Running requests of one scheduler.

    In a step, upstream's code calls :meth:`begin`; in its loop :meth:`advance`; then
    :meth:`cached_data`; and after the step :meth:`advance_counts` and, under async scheduling,
    :meth:`placeholders_to_add`. If :meth:`begin` returns None, upstream schedules the whole step.

    ``rows``, and the lists created with it, are valid while ``scheduler.running`` equals ``rows``.
    All other lists belong to the step being scheduled, and so do drafts that were proposed for it.
    """

    def __init__(self, scheduler: "Scheduler", lora_limits: "LoraLimits") -> None:
        self.scheduler, self.lora_limits = scheduler, lora_limits
        self.service = bounds.Service(scheduler, registry.SCHEDULE, _SKIPPED, _serves)
        #: Set as a step begins.
        self.cache: bounds.Cache = None  # type: ignore[assignment]
        #: Whether a step has begun, and :meth:`_advance_counts` is not called yet.
        self.begun = False
        self.counts: dict[str, int] = {}
        self.others: list[str] = []

    def _fill(self, rows: "list[Request]") -> None:
        empty = self.scheduler.kv_cache_manager.empty_kv_cache_blocks
        self.rows = rows
        self.names = [row.request_id for row in rows]
        #: ``num_computed_tokens`` minus output tokens, of a row that continues.
        self.bases = [row.num_prompt_tokens - 1 for row in rows]
        #: ``num_computed_tokens`` from which a row may need a block, or be left to upstream.
        self.nears: list[int]
        try:
            self.nears = [row.readiness.bounds.near for row in rows]
        except AttributeError:  # third-party code has appended a running request
            self.nears = [records.of(row).bounds.near for row in rows]
        #: Drafts of each row under async scheduling: placeholders, which the worker replaces.
        self.placeholders: list[int] = []
        if self.cache.asynchronous:
            self.placeholders = self.scheduler._spec_token_placeholders
        #: Whether rows may have drafts of their own instead: see :meth:`_take_drafts`.
        self.proposed = bool(self.scheduler.num_spec_tokens and not self.cache.asynchronous)
        self.drafts = [self.placeholders] * len(rows)  #: Drafts of each row.
        width = 1 + len(self.placeholders)
        self.widths = dict.fromkeys(self.names, width)  #: Tokens of each row that continues.
        #: Tokens of all rows before each row, and at last of all.
        self.ends: Sequence[int] = range(0, width * len(rows) + 1, width)
        self.no_blocks = dict.fromkeys(self.names, empty)

    def begin(
        self,
        scheduled: "list[Request]",
        blocks: "dict[str, KVCacheBlocks]",
        counts: dict[str, int],
        drafted: dict[str, list[int]],
    ) -> "Running | None":
        """Begin a step and return self; None to fall back to upstream.

        ``scheduled`` receives the step's running requests, ``blocks`` their new blocks by request
        id, ``counts`` their numbers of tokens to compute, and ``drafted`` their drafts. All four
        are empty.
        """
        cache = self.service.cache()
        self.begun = cache is not None
        if cache is None:
            return None
        self.scheduled, self.blocks, self.counts, self.drafted = scheduled, blocks, counts, drafted
        running = self.scheduler.running
        new = cache is not self.cache or running != self.rows
        if new:
            self.cache = cache
            self._fill(running.copy())
        rows, asynchronous = self.rows, cache.asynchronous
        self.computed = computed = [row.num_computed_tokens for row in rows]
        if self.proposed:
            self._take_drafts()
        #: Rows that may need a block or are left to upstream, in order.
        self.due = self._due_with_drafts() if self.placeholders or self.proposed else self._due()
        if asynchronous and not new:
            # Placeholders and arrived tokens both count, so the sum does not change on arrival.
            self.outputs = [*map(sub, computed, self.bases)]
        else:
            self.outputs = [_outputs(row) for row in rows]
            expected = [*map(add, self.outputs, self.bases)]
            if expected != computed:
                others = compress(range(len(rows)), map(ne, expected, computed))
                self.due = sorted({*self.due, *others})
        #: Whether each row is left to upstream's loop, which counts the step's adapters.
        self.crowded = self.lora_limits.crowded()
        if self.crowded:
            self.due = [*range(len(rows))]
        self.next_due = 0
        #: Rows left to upstream's loop, ranges of rows scheduled here, and rows of them for which
        #: blocks were allocated or cached.
        self.left: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.with_blocks: list[int] = []
        return self

    def _take_drafts(self) -> None:
        """Take the drafts that were proposed for this step: each row has its own number."""
        self.drafts = [row.spec_token_ids for row in self.rows]
        widths = (1 + len(drafts) for drafts in self.drafts)
        self.widths = dict(zip(self.names, widths, strict=True))
        self.ends = [*accumulate(self.widths.values(), initial=0)]

    def _due(self) -> list[int]:
        """Return :attr:`due` for rows of one token."""
        computed, rows = self.computed, self.rows
        due = [*compress(range(len(rows)), map(ge, computed, self.nears))]
        if self.cache.asynchronous:
            # A row at its bound is due only if it has no in-flight token.
            due = [
                row
                for row in due
                if computed[row] > self.nears[row] or not rows[row].num_output_placeholders
            ]
        return due

    def _due_with_drafts(self) -> list[int]:
        """Return :attr:`due` for rows with drafts, which need slots but are not cached."""
        rows = zip(self.rows, self.computed, self.bases, self.drafts, strict=True)
        return [
            row
            for row, (request, computed, base, drafts) in enumerate(rows)
            if computed + len(drafts) >= (limits := records.of(request).bounds).until
            or len(request._all_token_ids) >= limits.cached
            or request.spec_token_ids is not drafts
            or _outputs(request) + base != computed
        ]

    def advance(self, index: int, budget: int) -> tuple[int, int]:
        """Schedule rows from ``index`` on, up to the first row that is left to upstream's loop.

        ``budget`` is the token budget. Returns that row, and the remaining budget.
        """
        count = len(self.rows)
        if index >= count or budget <= 0 or len(self.scheduler.running) != count:
            return index, budget  # at the end, or a request has been preempted
        stop = bisect_right(self.ends, self.ends[index] + budget) - 1
        new: dict[str, KVCacheBlocks] = {}
        for row in islice(self.due, self.next_due, None):
            if row >= stop:
                break
            self.next_due += 1
            if row < index:
                continue
            blocks = self._allocate(row)
            if blocks is None:
                stop = row
                break
            new[self.names[row]] = blocks
            self.with_blocks.append(row)
        budget -= self.ends[stop] - self.ends[index]
        if stop < count and budget:  # upstream's loop schedules this row, perhaps in part
            self.left.append(stop)
            self.outputs[stop] = _outputs(self.rows[stop])
        if stop == index:
            return index, budget
        self.taken.append((index, stop))
        if stop - index == count:
            self.scheduled.extend(self.rows)
            self.counts.update(self.widths)
            self.blocks.update(self.no_blocks)
        else:
            names = self.names[index:stop]
            self.scheduled.extend(self.rows[index:stop])
            self.counts.update({name: self.widths[name] for name in names})
            self.blocks.update(
                dict.fromkeys(names, self.scheduler.kv_cache_manager.empty_kv_cache_blocks)
            )
        self.blocks.update(new)
        if self.placeholders:
            self.drafted.update(dict.fromkeys(self.names[index:stop], self.placeholders))
        for row in range(index, stop) if self.proposed else ():
            if drafts := self.drafts[row]:
                self.drafted[self.names[row]] = drafts
                self.rows[row].spec_token_ids = []
        return stop, budget

    def _allocate(self, row: int) -> "KVCacheBlocks | None":
        """Allocate slots for a row's tokens; None to leave the row to upstream's loop."""
        request, computed = self.rows[row], self.computed[row]
        limits, drafts = records.of(request).bounds, self.drafts[row]
        if (
            self.crowded
            or computed + len(drafts) >= limits.limit
            or _outputs(request) + self.bases[row] != computed
            or (drafts and request.spec_token_ids is not drafts)
        ):
            return None
        blocks = self.cache.allocate(request, limits, 1 + len(drafts))
        self.nears[row] = limits.near
        return blocks

    def cached_data(
        self, running: "list[Request]", resumed: "list[Request]"
    ) -> CachedRequestData | None:
        """Create the ``CachedRequestData`` of a step; None to fall back to upstream."""
        if not self.begun or self.scheduled is not running:
            return None
        if self.scheduler.use_pp and not self.scheduler.scheduler_config.async_scheduling:
            return None  # upstream also sends the sampled token ids
        before = self.scheduler.prev_step_scheduled_req_ids
        if not resumed and running == self.rows:
            names = self.names.copy()
            computed, outputs = self.computed, self.outputs
            new_blocks: list[tuple[list[int], ...] | None] = [None] * len(names)
            for row in (*self.with_blocks, *self.left):
                groups = self.blocks[names[row]].blocks
                if any(groups):
                    new_blocks[row] = tuple([[each.block_id for each in group] for group in groups])
            requests = running
        else:
            requests = [*running, *resumed]
            names = [request.request_id for request in requests]
            computed = [request.num_computed_tokens for request in requests]
            outputs = [_outputs(request) for request in requests]
            empty = self.scheduler.kv_cache_manager.empty_kv_cache_blocks
            new_blocks = [
                None if blocks is empty else blocks.get_block_ids(allow_none=True)
                for blocks in map(self.blocks.__getitem__, names)
            ]
        resumed_names = {request.request_id for request in resumed}
        if not before.isdisjoint(resumed_names):
            return None  # upstream fails
        joined: Iterable[Request] = ()
        if not before.issuperset(names):
            joined = (request for request in requests if request.request_id not in before)
        return CachedRequestData(
            req_ids=names,
            resumed_req_ids=resumed_names,
            new_token_ids=[],
            all_token_ids={request.request_id: request.all_token_ids.copy() for request in joined},
            new_block_ids=new_blocks,
            num_computed_tokens=computed,
            num_output_tokens=outputs,
        )

    def advance_counts(self, step: "SchedulerOutput") -> Iterable[tuple[str, int]]:
        """Advance the counts of a step; return request ids and counts left to upstream."""
        counts: dict[str, int] = step.num_scheduled_tokens
        if not self.begun or self.counts is not counts:
            self.begun = False
            return counts.items()
        return self._advance_counts(bool(step.preempted_req_ids))

    def placeholders_to_add(self, step: "SchedulerOutput") -> Iterable[str]:
        """Return the ids of the requests to which upstream must add placeholders.

        :meth:`advance_counts` has added those of all other scheduled requests.
        """
        counts: dict[str, int] = step.num_scheduled_tokens
        return self.others if self.counts is counts else counts

    def _advance_counts(self, preempted: bool) -> Iterator[tuple[str, int]]:
        """Advance the counts of the rows that :meth:`advance` scheduled.

        Yields the id and number of tokens of each other request, for upstream to advance. The
        request's bounds are then computed. ``preempted``: whether the step preempted a request.
        """
        self.begun = False
        counts = self.counts
        rows = self.rows
        if self.taken != [(0, len(rows))]:
            rows = [row for start, stop in self.taken for row in self.rows[start:stop]]
        joined = [*islice(counts, len(self.scheduled), None)]
        if preempted:  # some rows have left the step, or were scheduled by upstream
            rows = [row for row in rows if row.request_id in counts]
            names = {row.request_id for row in rows}
            self.others = [name for name in counts if name not in names]
        else:
            left = [self.names[row] for row in self.left]
            self.others = [name for name in left if name in counts] + joined
        if self.cache.asynchronous:
            width = 1 + len(self.placeholders)
            for row in rows:
                row.num_computed_tokens += width
                row.num_output_placeholders += width
        else:
            for row in rows:
                row.num_computed_tokens += counts[row.request_id]
        for name in self.others:
            yield name, counts[name]
            request = self.scheduler.requests[name]
            records.of(request).bounds = self.cache.bounds(request)
        for name in joined:
            if bounds.is_unusual(self.scheduler.requests[name]):
                gauges.fall_back(registry.SCHEDULE, gauges.OTHER_INPUT)


def _outputs(request: "Request") -> int:
    """Return the number of a request's output tokens, in-flight tokens included."""
    placeholders: int = request.num_output_placeholders
    return len(request._output_token_ids) + placeholders


def _serves(scheduler: "Scheduler") -> bool:
    """Return whether the feature serves a scheduler whose KV cache the bounds cover.

    With drafts, it leaves several KV cache groups, windows, recurrent states, and thresholds that
    drafts may exceed to upstream.
    """
    drafts = getattr(scheduler, "num_spec_tokens", None)
    if not drafts:
        return drafts is not None
    longest: int = scheduler.scheduler_config.long_prefill_token_threshold
    return bounds.is_full_attention(scheduler) and not 0 < longest <= drafts
