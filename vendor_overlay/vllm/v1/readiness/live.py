"""The step of V1's model runner: what the overlay does for a batch, in the order of a step.

Each InputBatch has a :class:`LiveBatch`, which owns the features and fixes of the batch as named
attributes, and calls them by name. Only a change of a row (a request is added, removed, moved,
swapped or truncated) goes to all that follow rows: each is a
:class:`~vllm.v1.readiness.feature.Feature`. A method that stands in for upstream's code returns a
result, or None or False to fall back.

**The path of a token**, sampled in step *n* under async scheduling. Upstream's functions are those
of ``gpu_model_runner``, unless their file is named. They call :mod:`~.worker`; samplers call
:mod:`~.sample`.

1. ``sample_tokens`` calls :meth:`LiveBatch.apply_grammars`, and ``_sample``
   :meth:`LiveBatch.begin_sampling`, which builds missing slots (their path: :mod:`~.sample.slots`).
   ``InputBatch.update_async_output_token_ids`` then calls :meth:`LiveBatch.settle_for_sampling`.
   These wait only if a new slot or a reader (:mod:`~.sample.readers`) needs the newest token of a
   row.
2. ``sampler.py`` or ``rejection_sampler.py`` calls :meth:`Slots.take`, applies the slots that it
   returns (:meth:`Penalties.apply`), and draws the token, if seeded with :meth:`Seeds.draw`.
3. :meth:`LiveBatch.observe_sampled` counts the token in its request's slots, on the device.
4. ``_bookkeeping_sync`` leaves the token on the device (``prev_sampled_token_ids``) and calls
   :meth:`History.place`: a placeholder, -1, is written into ``token_ids_cpu`` and the output list.
5. ``AsyncGPUModelRunnerOutput`` calls :meth:`Outputs.start_async`, which copies ids and logprobs to
   pinned memory and records an event; ``InputBatch.set_async_sampled_token_ids`` calls
   :meth:`History.expect`, which keeps ids and event as a :class:`SampledStep` in flight.
   ``sample_tokens`` returns.

Here the path forks. **To the client**: ``get_output``, which has a thread of its own if the
executor has workers, waits for the event (owner ``output``). ``core.py`` passes the token to the
scheduler (:mod:`~.core.step`, from 7), and its output goes to the front end and the client
(:mod:`~.frontend.step`, from 2). **Into the next step**, without a wait for that: the scheduler
has already sent step *n* + 1, which counts the token as a placeholder (:mod:`~.core.step`, 2 to 5).

6. ``_update_states`` begins with :meth:`History.begin_step` (8). It removes requests, updates those
   that continue at once (:meth:`StepInputs.advance`, which also appends the ids of their new blocks
   to the tables on the host), and adds others: :meth:`LiveBatch.remove_request` and
   :meth:`LiveBatch.add_request` tell all that follow rows.
7. ``_prepare_inputs`` calls :meth:`LiveBatch.check_inputs` and :meth:`StepInputs.prepare`. That
   sends the ids of new blocks (:meth:`BlockTables.commit`). Then ``prepare_kernel`` of
   :mod:`~.kernels.prepare_inputs` reads the token where 4 left it, and writes the inputs of all
   rows, and their slot mappings. :meth:`StepMetadata.slot_mappings` and :meth:`StepMetadata.build`
   hand these to attention, with views of the tables that :meth:`StepMetadata.keep` has kept from
   an earlier step. Where ``step_inputs`` does not serve, as with drafts, ``_prepare_input_ids``
   calls :meth:`InputIds.fill`.
8. When step *n* + 2 or a later one begins (6), :meth:`History.settle_older` writes the token over
   its placeholder. With 17 steps in flight, the 16 older are settled together; with drafts, or if
   anything on the host reads tokens, all but the newest at once, and the newest for a reader in 1.
   A copy that is late is waited for (owner ``history``).

Under synchronous scheduling, ``_bookkeeping_sync`` gets the tokens from :meth:`Outputs.show` in
place of 4 and 5, waits once for their event (owner ``output``) and writes them itself.

In 2, metadata belongs to a live batch if its lists are that batch's :attr:`LiveBatch.output_lists`.
If slots do not serve the step, upstream's code runs on these lists, all settled. A
:class:`ThinkingBudget` stands in as the batch's holder, and the samplers copy logits as
:meth:`LiveBatch.plan` has planned.
"""

# mirrors: nothing

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, SupportsIndex
from weakref import proxy

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import mask_rows
from vllm.v1.readiness.engine import fences, gauges, subclasses, switch
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.inputs import block_tables, slot_mappings
from vllm.v1.readiness.inputs.accepted_counts import AcceptedCounts
from vllm.v1.readiness.inputs.input_ids import InputIds
from vllm.v1.readiness.inputs.row_state import RowState
from vllm.v1.readiness.inputs.step_inputs import StepInputs
from vllm.v1.readiness.inputs.step_metadata import StepMetadata
from vllm.v1.readiness.outputs import readback
from vllm.v1.readiness.outputs.history import History, OutputLists
from vllm.v1.readiness.outputs.model_outputs import Outputs
from vllm.v1.readiness.sample import (
    bad_words,
    closed_grammars,
    logprob_ranks,
    penalties,
    readers,
    sampler_copies,
    stop_tokens,
    thinking_fixes,
)
from vllm.v1.readiness.sample.cpu_seeds import CpuSeeds
from vllm.v1.readiness.sample.grammars import Grammars
from vllm.v1.readiness.sample.seeds import Seeds
from vllm.v1.readiness.sample.thinking_budget import ThinkingBudget
from vllm.v1.readiness.sample.warm_up import WarmUp

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class LiveBatch:
    """Features and fixes of one InputBatch, which is referenced weakly.

    ``on`` names the features and fixes; None reads the environment. If ``on`` is empty, ``batch``
    may be None.

    Attributes:
        output_lists: output token ids of each row, if ``history`` is on.
        requests: requests in the batch, by id.
        serving: ``on`` without what does not serve this batch.
        outputs: creates the runner's outputs.
        others: features and fixes in the order of a step, each None if off.
    """

    def __init__(
        self, batch: "InputBatch", num_spec_tokens: int, on: frozenset[str] | None = None
    ) -> None:
        on = switch.enabled() if on is None else on
        with suppress(TypeError):  # not every class supports weak references
            batch = proxy(batch)
        self.batch, self.num_spec_tokens, self.on = batch, num_spec_tokens, on
        self.output_lists = OutputLists(self)
        self.requests: dict[str, CachedRequestState] = {}
        if on and batch.is_pooling_model:
            on &= registry.POOLING
        elif on:
            readers.check_declarations(batch)
            on = readers.count_plugin_processors(batch, on)
        self.serving = on
        self._samplers: list[object] = []  #: Samplers last checked for seams.
        self._samplers_plan_copies = False
        self._slots_with_seams: list[penalties.Penalties | bad_words.BadWords] = []
        # Rows and inputs
        self.row_state = RowState(batch) if registry.ROW_STATE in on else None
        self.accepted_counts = (
            AcceptedCounts(batch) if num_spec_tokens and registry.ACCEPTED_COUNTS in on else None
        )
        self.block_tables = (
            block_tables.attach(batch.block_table) if registry.BLOCK_TABLES in on else None
        )
        self.input_ids = InputIds(batch) if registry.INPUT_IDS in on else None
        self.step_metadata = StepMetadata(batch) if registry.STEP_INPUTS in on else None
        self.step_inputs = StepInputs(batch, self.step_metadata) if self.step_metadata else None
        # Sampling
        if registry.CLOSED_GRAMMARS in on:
            closed_grammars.install(batch)
        thinking_fixes.mend(batch, on)
        self.history: History | None = None
        self.thinking: ThinkingBudget | None = None
        self.penalties: penalties.Penalties | None = None
        self.bad_words: bad_words.BadWords | None = None
        if registry.HISTORY in on:
            self.history = history = History(batch, num_spec_tokens, self.requests)
            batch.req_output_token_ids = self.output_lists
            if registry.THINKING_BUDGET in on:
                self.thinking = ThinkingBudget.make(batch, history, on)
            if registry.PENALTIES in on:
                self.penalties = penalties.Penalties(batch, history)
            if registry.BAD_WORDS in on:
                self.bad_words = bad_words.BadWords(batch, history)
        self.slots = [slots for slots in (self.penalties, self.bad_words) if slots is not None]
        self.seeds = Seeds.make(batch) if registry.SEEDS in on else None
        self.cpu_seeds = (
            CpuSeeds(batch) if registry.CPU_SEEDS in on and batch.device.type == "cpu" else None
        )
        self.grammars = (
            Grammars(batch, num_spec_tokens)
            if registry.GRAMMARS in on and readback.has_events(batch.device)
            else None
        )
        self.kernels = WarmUp.make(batch, num_spec_tokens) if registry.WARM_UP in on else None
        # Outputs
        self.outputs = Outputs(batch, num_spec_tokens, registry.READBACK in on)
        followers = (
            *(self.history, self.row_state, self.accepted_counts, self.step_inputs),
            *(self.grammars, self.penalties, self.bad_words, self.thinking),
        )
        #: Those that keep state of rows or requests. Slots ask what the history has just cut.
        self._followers: list[Feature] = [each for each in followers if each is not None]

    @classmethod
    def off(cls, batch: "InputBatch | None" = None) -> "LiveBatch":
        """Return a live batch with all features and fixes off."""
        return cls(batch, 0, frozenset())

    def __reduce_ex__(self, protocol: SupportsIndex) -> "tuple[Callable[[], LiveBatch], tuple[()]]":
        """Pickle and copy as a live batch with all features and fixes off."""
        return LiveBatch.off, ()

    def __eq__(self, other: object) -> bool:
        """Compare the enabled words only, for callers that compare whole batches."""
        return isinstance(other, LiveBatch) and self.on == other.on

    __hash__ = None  # type: ignore[assignment]

    # Start-up

    def warm_up(self) -> None:
        """Compile kernels and allocate pinned memory before the first request."""
        for part in (self.step_inputs, *self.slots, self.seeds, self.outputs):
            if part is not None:
                part.warm_up()
        if registry.LOGPROB_RANKS in self.serving:
            logprob_ranks.warm_up(self.batch.device)

    def choose_slot_mappings(self, runner: "GPUModelRunner") -> None:
        """Choose the KV cache groups that need slot mappings. Called once the groups are known."""
        if self.block_tables is not None:
            slot_mappings.choose(runner)
        if self.step_inputs is not None:
            self.step_inputs.choose_slot_mappings(runner)

    # The batch changes for a step

    def add_request(self, request: "CachedRequestState") -> None:
        """Start tracking a request that was given a row."""
        self.requests[request.req_id] = request
        if registry.STOP_TOKENS in self.serving:
            stop_tokens.drop_foreign(request, self.batch.vocab_size)
        for follower in self._followers:
            follower.add_request(request)

    def remove_request(self, req_id: str, row: int) -> None:
        """Stop tracking a request that leaves its row. Go idle if no request remains."""
        if (request := self.requests.pop(req_id, None)) is None:
            return
        for follower in self._followers:
            follower.remove_request(request, row)
        if not self.requests:
            del request  # frees the slots of the request, unless the runner references it
            for follower in self._followers:
                follower.idle()

    def move_row(self, source: int, target: int) -> None:
        """Move the state of row ``source`` to the empty row ``target``. Called by ``condense``."""
        for follower in self._followers:
            follower.move_row(source, target)

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the states of two rows. Called by ``swap_states``."""
        for follower in self._followers:
            follower.swap_rows(one, other)

    def cut(self, req_id: str, length: int) -> None:
        """Prepare for truncating a request to ``length`` output tokens, placeholders included."""
        if self._followers and req_id in self.batch.req_id_to_index:
            for follower in self._followers:
                follower.cut(req_id, length)

    def plan(self, metadata: "SamplingMetadata") -> None:
        """Plan which logits the samplers copy, and attach the plan to new sampling metadata."""
        if self._samplers_plan_copies:
            metadata.copies = sampler_copies.plan(self.batch, metadata)

    def defers_prompts(self) -> bool:
        """Return whether new sampling metadata omits prompt token ids until penalties fall back."""
        return self.penalties in self._slots_with_seams

    # A step's inputs are prepared, or lost

    def check_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", counts: "np.ndarray"
    ) -> None:
        """See :meth:`History.check_inputs`."""
        if self.history is not None:
            self.history.check_inputs(runner, scheduled, counts)

    def forget_step(self) -> None:
        """Discard state of the last step. Called after a dummy run, which overwrites buffers."""
        if self.step_inputs is not None:
            self.step_inputs.forget_step()

    def lose_block_tables(self) -> None:
        """Mark the block tables on the device as lost, which sleep mode has discarded."""
        if self.block_tables is not None:
            self.block_tables.lose()
        if self.step_inputs is not None:
            self.step_inputs.lose_block_tables()

    # A step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: torch.Tensor
    ) -> bool:
        """Apply grammar bitmasks to ``logits`` [positions, vocab] in place; True if done."""
        if self.num_spec_tokens and registry.CLOSED_GRAMMARS in self.serving:
            mask_rows.match(scheduled, grammars)
        return self.grammars is not None and self.grammars.apply_grammars(
            scheduled, grammars, logits
        )

    def begin_sampling(
        self,
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
        runner: "GPUModelRunner | None" = None,
    ) -> None:
        """Begin to sample a step: build missing slots, and leave to upstream what does not serve.

        ``logits`` is [positions, vocab]. ``runner`` may be None if the samplers are vLLM's own.
        """
        self._check_samplers(runner)
        if self.cpu_seeds is not None:
            self.cpu_seeds.keep(runner)
        if self.seeds is not None:
            self.seeds.begin_sampling(runner)
        if self.history is None:
            return
        begun = self.history.begin_sampling(runner)
        if not begun and self.thinking is not None:
            self.thinking.begin_anew()
        # A derived batch may hold other output lists, which the samplers do not recognise.
        live = begun and self.batch.req_output_token_ids is self.output_lists
        metadata = self.batch.sampling_metadata
        for slots in self.slots:
            if live and slots in self._slots_with_seams:
                slots.begin_sampling(metadata, logits.shape[-1], drafts)
            else:
                slots.leave_step(gauges.OTHER_CLASS)
            if not slots.serving:
                slots.restore(metadata)

    def _check_samplers(self, runner: "GPUModelRunner | None") -> None:
        plans = registry.SAMPLER_COPIES in self.serving
        if not (self.slots or plans):
            return
        samplers = [getattr(runner, name, None) for name in ("sampler", "rejection_sampler")]
        if samplers == self._samplers:
            return
        self._samplers = samplers
        self._slots_with_seams = [
            slots
            for slots, module in ((self.penalties, penalties), (self.bad_words, bad_words))
            if slots is not None and subclasses.all_have_seam(samplers, module, slots.name)
        ]
        self._samplers_plan_copies = plans and subclasses.all_have_seam(
            samplers, sampler_copies, registry.SAMPLER_COPIES
        )
        self.plan(self.batch.sampling_metadata)

    def settle_for_sampling(self) -> bool:
        """Settle steps whose tokens a reader on the host needs; False to fall back to upstream."""
        if self.history is None:
            return False
        self.history.batch_updated()  # a runner that samples by itself does not begin it
        for owner, rows in (*readers.readers(self), *readers.counters(self)):
            self.history.settle_rows(rows, owner)
        return True

    def settle_older(self) -> None:
        """Settle all steps but the newest."""
        if self.history is not None:
            self.history.settle_older(fences.HISTORY)

    def settle_all(self, owner: str) -> None:
        """Settle all rows; ``owner`` names the fence."""
        if self.history is not None:
            self.history.settle_rows(range(len(self.output_lists)), owner)

    def host_needs_drafts(self) -> bool:
        """Return whether the host reads this step's draft tokens."""
        return self.history is None or any(True for _ in readers.readers(self))

    # A step has been sampled

    def observe_sampled(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Update the slots with the tokens that a step has sampled.

        ``sampled`` [requests, 1 + drafts] is padded with -1. ``discarded``, bool [>= requests],
        marks rows whose sampled tokens are dropped. Both are on the device.
        """
        for slots in self.slots:
            slots.observe_sampled(sampled, discarded)
