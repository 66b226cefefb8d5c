"""The live batch: the one door through which the seams in vLLM's V1 files call the overlay.

=====================  ============================  =======================================
verb                   called by                     moment
=====================  ============================  =======================================
attach                 InputBatch.__init__           the batch is being constructed
reserve                runner.profile_run            before memory is profiled
warm_up                runner's dummy runs           before the first request
add_request            InputBatch.add_request        a request has been given a row
remove_request         InputBatch.remove_request     a request is leaving its row
move_row               InputBatch.condense           a row has been moved into an empty one
swap_rows              InputBatch.swap_states        two rows are being exchanged
plan                   InputBatch, sampling metadata the batch has changed
begin_step             runner._update_states         before the batch changes for a step
cut                    runner._update_states         before an output is cut back
check_inputs           runner._prepare_inputs        before tokens are gathered on the host
prepare                runner._sample                before a step is sampled
settle_for_sampling    InputBatch, output tokens     in its place, before sampling
host_needs_drafts      runner._sample                before draft tokens are waited for
observe_sampled        runner.sample_tokens          after sampling
place                  runner._bookkeeping_sync      in place of writing placeholders
expect                 InputBatch, async tokens      a step's tokens are on their way
choose_slots           runner.initialize_kv_cache    the KV cache groups are known
lose_block_tables      runner.post_kv_cache_wake_up  the device's memory was given back
send_positions         runner._prepare_inputs        in place of sending RoPE's positions
=====================  ============================  =======================================

Some fixes have verbs of their own, which :class:`~vllm.v1.readiness.fixes.Fixes` adds. Those by
which the runner prepares a step's inputs are :class:`~vllm.v1.readiness.inputs.input_ids.InputIds`'.

The samplers find the live batch by the metadata that they are given, and call the modules of
their features: ``penalties.take``, ``bad_words.take``, ``thinking_budget.reads_lists`` and
``sampler_copies``; ``seeds`` knows the batch by its generators. The runner has a second door,
:mod:`~vllm.v1.readiness.outputs.model_outputs`: values that are only shown to people pass through it, under
any schedule, and for pooling models, which have no history. Model Runner V2 has one seam, in its
sampler, for :mod:`~vllm.v1.readiness.sample.sampler_copies_mrv2`.
"""

# mirrors: nothing

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import is_
from sys import modules
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar
from weakref import proxy

import torch
from vllm.logger import init_logger
from vllm.v1.readiness import features
from vllm.v1.readiness.engine import fences, gauges, subclasses, switch
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.fixes import Fixes
from vllm.v1.readiness.inputs import block_tables, rope_positions, slot_mappings
from vllm.v1.readiness.inputs.input_ids import InputIds
from vllm.v1.readiness.inputs.row_state import RowState
from vllm.v1.readiness.inputs.step_inputs import StepInputs
from vllm.v1.readiness.outputs.history import History, LiveRows
from vllm.v1.readiness.outputs.model_outputs import Outputs
from vllm.v1.readiness.sample import closed_grammars, readers, sampler_copies, seeds, thinking_fixes
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.readiness.sample.grammars import Grammars
from vllm.v1.readiness.sample.penalties import Penalties
from vllm.v1.readiness.sample.slots import Slots
from vllm.v1.readiness.sample.stop_tokens import StopTokens
from vllm.v1.readiness.sample.thinking_budget import ThinkingBudget

if TYPE_CHECKING:
    import numpy as np
    from vllm.config import CacheConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

T = TypeVar("T", bound=Feature)
#: The verbs that a step may call for each request or row, or that few features have.
_VERBS = ("add_request", "remove_request", "move_row", "swap_rows", "observe_sampled")


def attach(batch: "InputBatch", num_spec_tokens: int) -> None:
    """Attach a live batch to a batch that is being constructed."""
    setattr(batch, subclasses.ATTRIBUTE, LiveBatch(batch, num_spec_tokens))


def detached_state(batch: "InputBatch") -> dict[str, Any]:
    """Return the attributes of a copy of a batch, which has a live batch with everything off.

    Serves as the batch's ``__getstate__``: upstream serves copies.
    """
    state: dict[str, Any] = vars(batch)
    if isinstance(live := state.get(subclasses.ATTRIBUTE), LiveBatch):
        live.settle_older()
        state = {**state, subclasses.ATTRIBUTE: _off()}
    return state


def _off() -> "LiveBatch":
    """Return a live batch with everything off, which uses no batch."""
    return LiveBatch(None, 0, frozenset())


def of(batch: "InputBatch") -> "LiveBatch":
    """Return a batch's live batch; one with everything off if its class attached none."""
    return subclasses.attached(batch, LiveBatch, lambda: LiveBatch(batch, 0, frozenset()))


class LiveBatch(Fixes):
    """The features and fixes of one InputBatch.

    Nothing here keeps the batch alive, so that a batch that is replaced is freed at once.

    Args:
        batch: the batch; not used if nothing is on.
        num_spec_tokens: draft tokens a request and step.
        on: the features and fixes that are on; None for those of the environment.

    Attributes:
        outputs: the runner's outputs; the second door.
        step_inputs: the inputs of decode steps; a door of the runner.
        block_tables: None if off.
        inputs: the feature ``input-ids``, which the runner calls as it prepares a step's inputs.
        grammars: the feature ``grammars``, which the runner calls before it samples.
        history, penalties, bad_words, thinking, seeds: None if off.
    """

    def __init__(
        self, batch: "InputBatch", num_spec_tokens: int, on: frozenset[str] | None = None
    ) -> None:
        on = switch.enabled() if on is None else on
        with suppress(TypeError):  # not every batch can be referenced weakly
            batch = proxy(batch)
        super().__init__(batch, num_spec_tokens, on)
        self.rows = LiveRows(self)
        self.outputs = Outputs(batch, num_spec_tokens, features.READBACK in on)
        tables = batch.block_table if features.BLOCK_TABLES in on else None
        self.block_tables = block_tables.attach(tables)
        row_state = RowState(batch) if features.ROW_STATE in on else None
        if on and batch.is_pooling_model:
            on = frozenset()
        self.step_inputs = StepInputs(batch, features.STEP_INPUTS in on)
        if on:
            readers.check_declarations(batch)
            on = readers.count_plugin_processors(batch, on)
            thinking_fixes.mend(batch, on)
        self.inputs = InputIds(features.INPUT_IDS in on)
        self.grammars = Grammars(batch, num_spec_tokens, features.GRAMMARS in on)
        if features.CLOSED_GRAMMARS in on:
            closed_grammars.follow(batch)
        stop_tokens = StopTokens(batch) if features.STOP_TOKENS in on else None
        self._requests: dict[str, CachedRequestState] = {}
        #: The runner's samplers when they were last checked for seams; None: never.
        self._samplers: list[object] | None = None
        self._plans_copies = features.SAMPLER_COPIES in on
        self._samplers_plan_copies = False
        self.history: History | None = None
        self.thinking: ThinkingBudget | None = None
        self.penalties: Penalties | None = None
        self.bad_words: BadWords | None = None
        if features.HISTORY in on:
            self.history = History(batch, num_spec_tokens, self._requests)
            self.step_inputs.changing = partial(self.history.settle_older, fences.HISTORY)
            batch.req_output_token_ids = self.rows
            holder = batch.thinking_budget_state_holder
            if features.THINKING_BUDGET in on and holder is not None:
                self.thinking = ThinkingBudget(batch, proxy(self.history), holder, on)
                batch.thinking_budget_state_holder = self.thinking
                self.history.arrived = self.thinking.arrive
            if features.PENALTIES in on:
                self.penalties = Penalties(batch, self.history)
            if features.BAD_WORDS in on:
                self.bad_words = BadWords(batch, self.history)
        pair = (self.penalties, self.bad_words)
        self.seeds = seeds.follow(batch) if features.SEEDS in on else None
        self.slots: list[Slots] = [slots for slots in pair if slots is not None]
        self._slots_with_seams: list[Slots] = []
        # Thinking budgets compare a cut with the history as it was before.
        followers = (
            row_state,
            self.step_inputs if features.STEP_INPUTS in on else None,
            stop_tokens,
            self.accepted,
            self.grammars if self.grammars.on else None,
            self.thinking,
            self.history,
            self.seeds,
            *self.slots,
        )
        self._features: list[Feature] = [f for f in followers if f is not None]
        #: Verb to the methods of the features that have one of their own.
        self._verbs = {
            verb: [
                getattr(feature, verb)
                for feature in self._features
                if getattr(type(feature), verb) is not getattr(Feature, verb)
            ]
            for verb in _VERBS
        }

    def __reduce_ex__(self, protocol: SupportsIndex) -> "tuple[Callable[[], LiveBatch], tuple[()]]":
        """Stand in for the live batch in pickles and deep copies."""
        return _off, ()

    def __eq__(self, other: object) -> bool:
        """Compare what is on, for callers that compare whole batches."""
        return isinstance(other, LiveBatch) and self.on == other.on

    __hash__ = None  # type: ignore[assignment]

    def find(self, kind: type[T]) -> T | None:
        """Return the feature of this class, or None if it is off."""
        return next((feature for feature in self._features if type(feature) is kind), None)

    def reserve(self, cache: "CacheConfig") -> None:
        """See :meth:`Feature.reserve`; for ranks that sample."""
        for feature in self._features:
            feature.reserve(cache)

    def warm_up(self) -> None:
        """See :meth:`Feature.warm_up`; for ranks that sample."""
        self.outputs.warm_up()
        for feature in self._features:
            feature.warm_up()

    def add_request(self, request: "CachedRequestState") -> None:
        """See :meth:`Feature.add_request`."""
        self._requests[request.req_id] = request
        for add in self._verbs["add_request"]:
            add(request)

    def remove_request(self, req_id: str, row: int) -> None:
        """See :meth:`Feature.remove_request` and :meth:`Feature.idle`."""
        if (request := self._requests.pop(req_id, None)) is None:
            return
        for remove in self._verbs["remove_request"]:
            remove(request, row)
        if not self._requests:
            del request  # and the slots kept for it, unless the runner still knows it
            for feature in self._features:
                feature.idle()

    def move_row(self, source: int, target: int) -> None:
        """See :meth:`Feature.move_row`."""
        for move in self._verbs["move_row"]:
            move(source, target)

    def swap_rows(self, one: int, other: int) -> None:
        """See :meth:`Feature.swap_rows`."""
        for swap in self._verbs["swap_rows"]:
            swap(one, other)

    def plan(self, metadata: "SamplingMetadata") -> None:
        """Attach a plan of the samplers' copies to metadata that has just been made."""
        if self._samplers_plan_copies:
            metadata.copies = sampler_copies.plan(self.batch, metadata)

    def begin_step(self) -> None:
        """See :meth:`History.begin_step`."""
        if self.history is not None:
            self.history.begin_step(self.step_inputs.unchanged)

    def cut(self, req_id: str, length: int) -> None:
        """See :meth:`Feature.cut`; the request need not be in the batch."""
        if self._features and req_id in self.batch.req_id_to_index:
            for feature in self._features:
                feature.cut(req_id, length)

    def check_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", counts: "np.ndarray"
    ) -> None:
        """See :meth:`History.check_inputs`; in a pipeline no stage that samples embeds tokens."""
        alone = runner.parallel_config.pipeline_parallel_size == 1
        if self.history is not None and runner.use_async_scheduling and alone:
            self.history.check_inputs(counts, scheduled.scheduled_spec_decode_tokens)

    def prepare(
        self,
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
        runner: "GPUModelRunner | None" = None,
    ) -> None:
        """Decide how the next step is served, and make ready what serves it.

        Args:
            logits: [positions, vocab].
            drafts: the step's drafts, if it has any.
            runner: the model runner; None for one with vLLM's own samplers.
        """
        self._check_samplers(runner)
        if self.cpu_seeds is not None:
            self.cpu_seeds.keep(runner)
        if self.seeds is not None:
            self.seeds.prepare(runner)
        if self.history is None:
            return
        begun = self.history.prepare()
        if not begun:
            self._leave_to_upstream(runner)
        # A derived batch may have lists of its own, which the samplers do not recognise.
        live = begun and self.batch.req_output_token_ids is self.rows
        for slots in self.slots:
            if live and slots in self._slots_with_seams:
                slots.prepare(self.batch.sampling_metadata, logits.shape[-1], drafts)
            else:
                slots.leave_step()

    def _check_samplers(self, runner: "GPUModelRunner | None") -> None:
        """Find out which seams the runner's samplers have, if they have been replaced."""
        if not (self.slots or self._plans_copies):
            return
        samplers = [getattr(runner, name, None) for name in ("sampler", "rejection_sampler")]
        if self._samplers is not None and all(map(is_, samplers, self._samplers)):
            return
        self._samplers = samplers
        self._slots_with_seams = [
            slots
            for slots in self.slots
            if subclasses.all_have_seam(samplers, modules[type(slots).__module__])
        ]
        self._samplers_plan_copies = self._plans_copies and subclasses.all_have_seam(
            samplers, sampler_copies
        )
        self.plan(self.batch.sampling_metadata)

    def _leave_to_upstream(self, runner: "GPUModelRunner | None") -> None:
        """Take into account that the runner may have cut outputs without calling :meth:`cut`."""
        gauges.fall_back(features.HISTORY, gauges.OTHER_CLASS)
        logger.warning_once(
            "Readiness overlay: %s does not call GPUModelRunner._update_states. vLLM's own paths "
            "serve its penalties, bad words and thinking budgets, which wait on every step.",
            "the runner" if runner is None else subclasses.full_name(type(runner)),
        )
        if self.thinking is not None:
            self.thinking.begin_anew()

    def settle_for_sampling(self) -> bool:
        """Settle the rows that a consumer on the host needs to sample this step.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.batch_updated()
        for owner, rows in (*readers.readers(self), *readers.counters(self)):
            self.history.settle_rows(rows, owner)
        return True

    def settle_older(self) -> None:
        """Settle every step but the newest, as the host's code without a part in the batch sees."""
        if self.history is not None:
            self.history.settle_older(fences.HISTORY)

    def settle_all(self, owner: str) -> None:
        """Settle every row, waiting in the name of ``owner``."""
        if self.history is not None:
            self.history.settle_rows(range(len(self.rows)), owner)

    def host_needs_drafts(self) -> bool:
        """Whether a consumer on the host needs this step's draft tokens."""
        return self.history is None or any(True for _ in readers.readers(self))

    def place(self, max_model_len: int) -> bool:
        """See :meth:`History.place`.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.place(max_model_len)
        return True

    def expect(self, tokens: torch.Tensor, event: torch.Event) -> bool:
        """See :meth:`History.expect`.

        Args:
            tokens: [rows, 1 + drafts] on the host, valid once ``event`` has completed.
            event: recorded behind the copy.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.expect(tokens, event)
        return True

    def observe_sampled(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """See :meth:`Feature.observe_sampled`."""
        for observe in self._verbs["observe_sampled"]:
            observe(sampled, discarded)

    def choose_slots(self, runner: "GPUModelRunner") -> None:
        """See :func:`slot_mappings.choose`."""
        if self.block_tables is not None:
            slot_mappings.choose(runner)

    def lose_block_tables(self) -> None:
        """See :meth:`BlockTables.lose`; the next step is prepared anew."""
        self.step_inputs.forget()
        if self.block_tables is not None:
            self.block_tables.lose()

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool:
        """See :func:`rope_positions.send`.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        return features.ROPE_POSITIONS in self.on and rope_positions.send(runner, tokens)
