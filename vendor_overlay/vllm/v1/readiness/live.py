"""Live batch: the overlay's entry point for vLLM's V1 model runner and its InputBatch.

A live batch has the verbs of :class:`~vllm.v1.readiness.feature.Feature`. It also has methods that

- InputBatch calls: ``plan`` for new sampling metadata, ``settle_for_sampling`` before sampling, and
  ``expect`` for tokens being copied to the host;
- the runner calls: ``begin_step`` in ``_update_states``, ``check_inputs`` in ``_prepare_inputs``,
  ``prepare`` and ``host_needs_drafts`` in ``_sample``, and ``place`` in ``_bookkeeping_sync``.

The samplers reach the live batch through the sampling metadata, and call feature modules directly:
``penalties``, ``bad_words``, ``thinking_budget``, ``sampler_copies``, ``seeds``. The runner creates
outputs through :mod:`~vllm.v1.readiness.outputs.model_outputs`, also for pooling models. Model
Runner V2 has one seam, in its sampler, for :mod:`~vllm.v1.readiness.sample.sampler_copies_mrv2`.
"""

# mirrors: nothing

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import is_
from sys import modules
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import proxy

import torch
from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import fences, gauges, subclasses, switch
from vllm.v1.readiness.feature import VERBS, F, Feature
from vllm.v1.readiness.inputs.pinned_inputs import keep as keep_inputs
from vllm.v1.readiness.outputs.history import History, LiveRows
from vllm.v1.readiness.outputs.model_outputs import Outputs, wait
from vllm.v1.readiness.sample import readers, sampler_copies
from vllm.v1.readiness.sample.bad_words import BadWords
from vllm.v1.readiness.sample.cpu_seeds import CpuSeeds
from vllm.v1.readiness.sample.penalties import Penalties
from vllm.v1.readiness.sample.seeds import Seeds
from vllm.v1.readiness.sample.slots import Slots
from vllm.v1.readiness.sample.thinking_budget import ThinkingBudget
from vllm.v1.readiness.watch.startup import start

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

__all__ = ["LiveBatch", "Outputs", "attach", "detached_state", "keep_inputs", "of", "start", "wait"]

logger = init_logger(__name__)


def attach(batch: "InputBatch", num_spec_tokens: int) -> None:
    """Attach a live batch to an InputBatch. Called in the InputBatch's constructor."""
    setattr(batch, subclasses.ATTRIBUTE, LiveBatch(batch, num_spec_tokens))


def detached_state(batch: "InputBatch") -> dict[str, Any]:
    """Return an InputBatch's state for ``__getstate__``, with the overlay disabled."""
    state: dict[str, Any] = vars(batch)
    if isinstance(live := state.get(subclasses.ATTRIBUTE), LiveBatch):
        live.settle_older()
        state = {**state, subclasses.ATTRIBUTE: _off()}
    return state


def _off() -> "LiveBatch":
    return LiveBatch(None, 0, frozenset())


def of(batch: "InputBatch") -> "LiveBatch":
    """Return the live batch of an InputBatch; one with everything off if its class skips attach."""
    return subclasses.attached(batch, LiveBatch, lambda: LiveBatch(batch, 0, frozenset()))


class LiveBatch(Feature):
    """Features and fixes of one InputBatch, which is referenced weakly.

    ``on`` names the features and fixes; None reads the environment. If ``on`` is empty, ``batch``
    may be None.

    Attributes:
        rows: output token ids of each row, if History is on.
        requests: requests in the batch, by id.
        outputs: creates the runner's outputs.
        history, thinking, penalties, bad_words, seeds: features; None if off.
        serving: ``on`` without the features that a custom logits processor disables.
    """

    def __init__(
        self, batch: "InputBatch", num_spec_tokens: int, on: frozenset[str] | None = None
    ) -> None:
        on = switch.enabled() if on is None else on
        with suppress(TypeError):  # not every class supports weak references
            batch = proxy(batch)
        super().__init__(batch)
        self.num_spec_tokens = num_spec_tokens
        self.on = on
        self.rows = LiveRows(self)
        self.requests: dict[str, CachedRequestState] = {}
        self._features: list[Feature] = []
        pooling = bool(on) and batch.is_pooling_model
        if on and not pooling:
            readers.check_declarations(batch)
            on = readers.count_plugin_processors(batch, on)
        self.serving = on
        #: Samplers last checked for seams; None before the first check.
        self._samplers: list[object] | None = None
        self._plans_copies = registry.SAMPLER_COPIES in on and not pooling
        self._samplers_plan_copies = False
        for kind in registry.classes(on):
            if (kind.pooling or not pooling) and (feature := kind.make(self)) is not None:
                self._features.append(feature)
        self.outputs = self.find(Outputs) or Outputs(batch, num_spec_tokens, False)
        self.history = self.find(History)
        self.thinking = self.find(ThinkingBudget)
        self.penalties = self.find(Penalties)
        self.bad_words = self.find(BadWords)
        self.seeds = self.find(Seeds)
        self._cpu_seeds = self.find(CpuSeeds)
        self.slots = [slots for slots in (self.penalties, self.bad_words) if slots is not None]
        self._slots_with_seams: list[Slots] = []
        #: The features' overriding methods, by verb.
        self._methods = {verb: self._of(verb) for verb in VERBS}
        for verb in VERBS - vars(LiveBatch).keys():
            if methods := self._methods[verb]:
                setattr(self, verb, methods[0] if len(methods) == 1 else partial(_all, methods))

    def _of(self, verb: str) -> list[Callable[..., Any]]:
        return [
            getattr(feature, verb)
            for feature in self._features
            if getattr(type(feature), verb) is not getattr(Feature, verb)
        ]

    def __reduce_ex__(self, protocol: SupportsIndex) -> "tuple[Callable[[], LiveBatch], tuple[()]]":
        """Pickle and copy as a live batch with all features and fixes off."""
        return _off, ()

    def __eq__(self, other: object) -> bool:
        """Compare the enabled words only, for callers that compare whole batches."""
        return isinstance(other, LiveBatch) and self.on == other.on

    __hash__ = None  # type: ignore[assignment]

    def find(self, kind: type[F]) -> F | None:
        """Return the feature of this class; None if it is off."""
        return next((feature for feature in self._features if type(feature) is kind), None)

    def add_request(self, request: "CachedRequestState") -> None:
        """See :meth:`Feature.add_request`."""
        self.requests[request.req_id] = request
        for add in self._methods["add_request"]:
            add(request)

    def remove_request(self, req_id: str, row: int) -> None:
        """See :meth:`Feature.remove_request`. Go idle if no request remains."""
        if (request := self.requests.pop(req_id, None)) is None:
            return
        for remove in self._methods["remove_request"]:
            remove(request, row)
        if not self.requests:
            del request  # frees the slots of the request, unless the runner references it
            self.idle()

    def plan(self, metadata: "SamplingMetadata") -> None:
        """Plan which logits the samplers copy, and attach the plan to new sampling metadata."""
        if self._samplers_plan_copies:
            metadata.copies = sampler_copies.plan(self.batch, metadata)

    def defers_prompts(self) -> bool:
        """Return whether new sampling metadata omits prompt token ids until penalties fall back."""
        return self.penalties is not None and self.penalties in self._slots_with_seams

    def observe_sampled(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """See :meth:`Feature.observe_sampled`. Overridden because profiler scopes wrap it."""
        for observe in self._methods["observe_sampled"]:
            observe(sampled, discarded)

    def begin_step(self) -> None:
        """See :meth:`History.begin_step`."""
        if self.history is not None:
            self.history.begin_step()

    def cut(self, req_id: str, length: int) -> None:
        """See :meth:`Feature.cut`. A no-op if the request is not in the batch."""
        if self._features and req_id in self.batch.req_id_to_index:
            for cut in self._methods["cut"]:
                cut(req_id, length)

    def check_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", counts: "np.ndarray"
    ) -> None:
        """See :meth:`History.check_inputs`. With pipeline parallelism, nothing is checked."""
        # In a pipeline, the stage that samples does not embed tokens.
        alone = runner.parallel_config.pipeline_parallel_size == 1
        if self.history is not None and runner.use_async_scheduling and alone:
            self.history.check_inputs(counts, scheduled.scheduled_spec_decode_tokens)

    def prepare(
        self,
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
        runner: "GPUModelRunner | None" = None,
    ) -> None:
        """Decide which features process a step, and prepare them; the others fall back to upstream.

        ``logits`` is [positions, vocab]. ``runner`` may be None if the samplers are vLLM's own.
        """
        self._check_samplers(runner)
        if self._cpu_seeds is not None:
            self._cpu_seeds.keep(runner)
        if self.seeds is not None:
            self.seeds.prepare(runner)
        if self.history is None:
            return
        begun = self.history.prepare()
        if not begun:
            self._leave_to_upstream(runner)
        # A derived batch may hold other output lists, which the samplers do not recognise.
        live = begun and self.batch.req_output_token_ids is self.rows
        for slots in self.slots:
            if live and slots in self._slots_with_seams:
                slots.prepare(self.batch.sampling_metadata, logits.shape[-1], drafts)
            else:
                slots.leave_step()
            if not slots.serving:
                slots.restore(self.batch.sampling_metadata)

    def _check_samplers(self, runner: "GPUModelRunner | None") -> None:
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
        """Fall back to upstream, because the runner may truncate outputs without :meth:`cut`."""
        gauges.fall_back(registry.HISTORY, gauges.OTHER_CLASS)
        logger.warning_once(
            "Readiness overlay: %s does not call GPUModelRunner._update_states. Falling back to "
            "vLLM for penalties, bad words and thinking budgets, for which the host waits on every "
            "step.",
            "the runner" if runner is None else subclasses.full_name(type(runner)),
        )
        if self.thinking is not None:
            self.thinking.begin_anew()

    def settle_for_sampling(self) -> bool:
        """Settle the rows whose tokens the host reads; False to fall back to upstream."""
        if self.history is None:
            return False
        self.history.batch_updated()
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
            self.history.settle_rows(range(len(self.rows)), owner)

    def host_needs_drafts(self) -> bool:
        """Return whether the host reads this step's draft tokens."""
        return self.history is None or any(True for _ in readers.readers(self))

    def place(self, max_model_len: int) -> bool:
        """See :meth:`History.place`; False to fall back to upstream."""
        if self.history is None:
            return False
        self.history.place(max_model_len)
        return True

    def expect(self, tokens: torch.Tensor, event: torch.Event) -> bool:
        """See :meth:`History.expect`; False to fall back to upstream."""
        if self.history is None:
            return False
        self.history.expect(tokens, event)
        return True


def _all(methods: list[Callable[..., Any]], *arguments: Any) -> Any:  # noqa: ANN401
    """Call all methods, and return the first result that is not None."""
    answer = None
    for method in methods:
        result = method(*arguments)
        answer = result if answer is None else answer
    return answer
