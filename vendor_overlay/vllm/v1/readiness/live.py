"""The live batch: what the seams in InputBatch, the runner and the samplers call."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import proxy, ref

import torch
from vllm.logger import init_logger
from vllm.v1.readiness import features, sampler_copies, switch
from vllm.v1.readiness.allowed_tokens import AllowedTokens
from vllm.v1.readiness.bad_words import BadWords
from vllm.v1.readiness.history import History
from vllm.v1.readiness.outputs import Outputs
from vllm.v1.readiness.penalties import Penalties
from vllm.v1.readiness.slots import Slots
from vllm.v1.readiness.subclasses import full_name, has_seam
from vllm.v1.readiness.thinking_budget import ThinkingBudget
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = init_logger(__name__)

#: vLLM's own logits processors, which read no tokens of an output.
_OWN_PROCESSORS = (LogitBiasLogitsProcessor, MinPLogitsProcessor, MinTokensLogitsProcessor)


class LiveRows(list["list[int] | None"]):
    """The output lists of the live batch's rows.

    Sampling metadata that holds this very object speaks of the live batch; any other list,
    whatever is in it, does not.
    """

    def __init__(self, live: "LiveBatch") -> None:
        super().__init__()
        self._live = ref(live)

    @property
    def live(self) -> "LiveBatch | None":
        """The live batch; None once it is gone."""
        return self._live()


class LiveBatch:
    """One InputBatch's features; None stands for one that is off.

    Nothing here keeps the batch alive, so that a batch that is replaced goes at once.

    Args:
        batch: whose features these are; not used where none is on.
        num_spec_tokens: draft tokens a request and step.
        on: the features that are on; None: those that the environment leaves on.
    """

    def __init__(
        self, batch: "InputBatch", num_spec_tokens: int, on: frozenset[str] | None = None
    ) -> None:
        batch = proxy(batch)
        on = switch.enabled() if on is None else on
        self.batch = batch
        self.on = on
        self.rows = LiveRows(self)
        self._begun = False
        #: The runner's samplers, as they were last looked at; None: never yet.
        self._samplers: list[object] | None = None
        self._plans = False
        self.outputs = Outputs(batch, num_spec_tokens, "readback" in on)
        self.allowed = AllowedTokens(batch) if "allowed-tokens" in on else None
        if on and batch.is_pooling_model:
            on = frozenset()
        if on and _has_entry_point_processors(batch):
            on = _with_entry_point_processors(batch, on)
        self.plans = "sampler-copies" in on
        self.history = History(batch, num_spec_tokens) if "history" in on else None
        self.penalties: Penalties | None = None
        if self.history is not None and "penalties" in on:
            self.penalties = Penalties(batch, self.history)
        self.thinking: ThinkingBudget | None = None
        holder = batch.thinking_budget_state_holder if "thinking-budget" in on else None
        if self.history is not None and holder is not None:
            self.thinking = ThinkingBudget(batch, proxy(self.history), holder)
            batch.thinking_budget_state_holder = self.thinking
            self.history.arrived = self.thinking.arrive
        self.bad_words: BadWords | None = None
        if self.history is not None and "bad-words" in on:
            self.bad_words = BadWords(batch, self.history)
        #: The features that keep something on the device for each request.
        self.slots: list[Slots] = [
            each for each in (self.penalties, self.bad_words) if each is not None
        ]
        #: Those whose seams the samplers have.
        self._applied: list[Slots] = []

    @classmethod
    def off(cls, batch: "InputBatch") -> "LiveBatch":
        """With every feature off."""
        return cls(batch, 0, frozenset())

    def __eq__(self, other: object) -> bool:
        """Two are equal where the same features are on, for who compares whole batches."""
        return isinstance(other, LiveBatch) and self.on == other.on

    __hash__ = None  # type: ignore[assignment]

    def reserve(self, cache: "CacheConfig") -> None:
        """Called before memory is profiled, on ranks that sample."""
        if self.penalties is not None:
            self.penalties.reserve(cache)

    def warm_up(self) -> None:
        """Called before the first request, on ranks that sample."""
        self.outputs.warm_up()
        for slots in self.slots:
            slots.warm_up()

    def add_request(self, request: "CachedRequestState") -> None:
        """A request has been given a row."""
        if self.allowed is not None:
            self.allowed.add_request(request)
        if self.history is not None:
            self.history.add_request(request)
        for slots in self.slots:
            slots.add_request(request)

    def remove_request(self, req_id: str, row: int) -> None:
        """A request has lost its row."""
        if self.allowed is not None:
            self.allowed.remove_request(row)
        if self.history is None or (request := self.history.remove_request(req_id)) is None:
            return
        for slots in self.slots:
            slots.remove_request(request, row)
        if self.history.idle:
            del request  # with what is kept for it, unless the runner still knows it
            for slots in self.slots:
                slots.idle()

    def move_row(self, source: int, target: int) -> None:
        """See :meth:`AllowedTokens.move_row`."""
        if self.allowed is not None:
            self.allowed.move_row(source, target)

    def swap_rows(self, one: int, other: int) -> None:
        """See :meth:`AllowedTokens.swap_rows`."""
        if self.allowed is not None:
            self.allowed.swap_rows(one, other)

    def leave_mask(self, row: int) -> None:
        """See :meth:`AllowedTokens.leave_mask`."""
        if self.allowed is not None:
            self.allowed.leave_mask(row)

    def swap_masks(self, one: int, other: int) -> bool:
        """Exchange the masks of two rows.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.allowed is None:
            return False
        self.allowed.swap_masks(one, other)
        return True

    def plan(self, metadata: "SamplingMetadata") -> None:
        """The batch has changed; see :mod:`vllm.v1.readiness.sampler_copies`.

        Args:
            metadata: just made from it.
        """
        if self._plans:
            metadata.copies = sampler_copies.plan(self.batch, metadata)

    def begin_step(self) -> None:
        """Called before the batch changes for a step."""
        self._begun = True
        if self.history is not None:
            self.history.begin_step()

    def cut(self, req_id: str, length: int) -> None:
        """Called before the runner cuts an output back to what the scheduler has kept.

        Args:
            req_id: a request, in the batch or not.
            length: how many of its output tokens and placeholders are kept.
        """
        if req_id not in self.batch.req_id_to_index:
            return
        if self.thinking is not None:
            self.thinking.cut(self.batch.req_id_to_index[req_id], length)
        if self.history is None:
            return
        self.history.cut(req_id, length)
        for slots in self.slots:
            slots.cut(req_id, length)

    def prepare(
        self,
        logits: torch.Tensor,
        drafts: "SpecDecodeMetadata | None",
        runner: "GPUModelRunner | None" = None,
    ) -> None:
        """Called before sampling.

        Args:
            logits: [positions, vocab].
            drafts: the step's drafts, if it has any.
            runner: which samples; None: with vLLM's own samplers.
        """
        begun, self._begun = self._begun, False
        self._look_at_samplers(runner)
        if self.history is None:
            return
        self.history.batch_updated()
        if not begun:
            self._leave_to_upstream(runner)
        # A derived batch may have lists of its own, which the samplers do not take for ours.
        live = begun and self.batch.req_output_token_ids is self.rows
        for slots in self.slots:
            if live and slots in self._applied:
                slots.prepare(self.batch.sampling_metadata, logits.shape[-1], drafts)
            else:
                slots.leave_step()

    def _look_at_samplers(self, runner: "GPUModelRunner | None") -> None:
        """Find out which seams the runner's samplers have, if they are not those of before."""
        samplers = [getattr(runner, name, None) for name in ("sampler", "rejection_sampler")]
        if self._samplers is not None and all(map(is_, samplers, self._samplers)):
            return
        self._samplers = samplers
        self._applied = [each for each in self.slots if _call(samplers, _SEAMS[type(each)])]
        self._plans = self.plans and _call(samplers, sampler_copies)
        self.plan(self.batch.sampling_metadata)

    def _leave_to_upstream(self, runner: "GPUModelRunner | None") -> None:
        """Take note that the runner may have cut outputs without a word."""
        logger.warning_once(
            "Readiness overlay: %s does not call GPUModelRunner._update_states. vLLM's own paths "
            "serve its penalties, bad words and thinking budgets, which wait on every step.",
            "the runner" if runner is None else full_name(type(runner)),
        )
        if self.thinking is not None:
            self.thinking.begin_anew()

    def settle_for_sampling(self) -> bool:
        """Settle what a consumer on the host needs to sample this step.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.batch_updated()
        for owner, rows in (*self._readers(), *self._counters(self.history)):
            self.history.settle_rows(rows, owner)
        return True

    def settle_all(self, owner: str) -> None:
        """Settle every row's history, in the name of ``owner``."""
        if self.history is not None:
            self.history.settle_rows(range(len(self.rows)), owner)

    def host_needs_drafts(self) -> bool:
        """Whether a consumer on the host needs this step's draft tokens."""
        return self.history is None or any(True for _ in self._readers())

    def place(self, max_model_len: int) -> bool:
        """Write a placeholder for each token that this step has sampled.

        Args:
            max_model_len: how many tokens a request may have.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.place(max_model_len)
        return True

    def record(self, tokens: torch.Tensor, event: torch.Event) -> bool:
        """Take note of the tokens that are on their way to the host.

        Args:
            tokens: [rows, 1 + drafts] on the host, valid once ``event`` has completed.
            event: recorded behind the copy.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.history is None:
            return False
        self.history.record(tokens, event)
        return True

    def count(self, sampled: torch.Tensor, discarded: torch.Tensor) -> None:
        """Called after sampling; see :meth:`Slots.record`."""
        for slots in self.slots:
            slots.record(sampled, discarded)

    def _readers(self) -> Iterator[tuple[str, Iterable[int]]]:
        """Who needs the newest token of which rows on the host."""
        batch = self.batch
        if batch.bad_words_token_ids and not (self.bad_words and self.bad_words.serving):
            yield "bad words", batch.bad_words_token_ids
        if batch.logitsprocs_need_output_token_ids and not self._only_own_processors():
            yield "logits processors", range(batch.num_reqs)
        holder = batch.thinking_budget_state_holder
        if self.thinking is not None:
            if rows := list(self.thinking.waiting()):
                yield "thinking budget", rows
        elif holder is not None and holder.has_tracked_requests():
            yield "thinking budget", range(batch.num_reqs)
        if not batch.no_penalties and not (self.penalties and self.penalties.serving):
            yield "penalties", range(batch.num_reqs)

    def _only_own_processors(self) -> bool:
        """Whether it is for thinking alone that upstream takes logits processors for readers."""
        return self.thinking is not None and all(
            type(processor) in _OWN_PROCESSORS for processor in self.batch.logitsprocs.all
        )

    def _counters(self, history: History) -> Iterator[tuple[str, Iterable[int]]]:
        """Who needs to know how many tokens which rows have.

        Known without them, but for how many drafts were accepted. Upstream waits to know
        that where it keeps the lists, for whatever reason, and else takes it that all were.
        """
        batch = self.batch
        if not history.drafted or not history.in_flight[-1].metadata.output_token_ids:
            return
        if not batch.sampling_metadata.output_token_ids:
            return
        for processor in batch.logitsprocs.non_argmax_invariant:
            if isinstance(processor, MinTokensLogitsProcessor):
                yield "min tokens", processor.min_toks


def penalties_for(
    metadata: "SamplingMetadata",
    logits: torch.Tensor,
    drafts: "SpecDecodeMetadata | None" = None,
) -> Penalties | None:
    """The live batch's penalties, if this is the live batch; else None, for upstream's.

    Where the rows are the live ones and the rest is not, upstream's code reads the rows'
    lists, which are settled for it.

    Args:
        metadata: whose penalties are to be applied.
        logits: [positions, vocab] that they are to be applied to.
        drafts: the drafts that the positions are those of; None: of the requests.
    """
    rows = metadata.output_token_ids
    if metadata.no_penalties or not isinstance(rows, LiveRows) or (live := rows.live) is None:
        return None
    penalties = live.penalties
    if penalties is not None and penalties.recognises(metadata, logits, drafts):
        return penalties
    live.settle_all(Penalties.owner)
    return None


def bad_words_for(
    metadata: "SamplingMetadata",
    logits: torch.Tensor,
    drafts: "SpecDecodeMetadata | None" = None,
) -> BadWords | None:
    """As :func:`penalties_for`, of the live batch's bad words."""
    rows = metadata.output_token_ids
    if not metadata.bad_words_token_ids or not isinstance(rows, LiveRows):
        return None
    if (live := rows.live) is None:
        return None
    words = live.bad_words
    if words is not None and words.recognises(metadata, logits, drafts):
        return words
    live.settle_all(BadWords.owner)
    return None


def thinking_reads_lists(holder: "ThinkingBudgetStateHolder | None") -> bool:
    """Whether a thinking budget needs lists of each row's output with its drafts.

    Args:
        holder: the batch's state of thinking budgets, upstream's or ours.
    """
    if holder is None or isinstance(holder, ThinkingBudget):
        return False
    return bool(holder.has_tracked_requests())


#: What the samplers call for a feature with slots.
_SEAMS: Mapping[type[Slots], Callable[..., object]] = {
    Penalties: penalties_for,
    BadWords: bad_words_for,
}


def _call(samplers: Sequence[object], called: ModuleType | Callable[..., object]) -> bool:
    """Whether every sampler calls something of ours; said once if one does not."""
    for sampler in samplers:
        if sampler is not None and not has_seam(sampler, called):
            logger.warning_once(
                "Readiness overlay: the sampler %s is left to vLLM's own code, because its class "
                "does not call %s.",
                *(full_name(type(sampler)), called.__name__.rpartition(".")[2]),
            )
            return False
    return True


def _has_entry_point_processors(batch: "InputBatch") -> bool:
    """Whether there are logits processors that upstream does not take for readers.

    It counts those that are named when the engine is made, and none that is installed as an
    entry point.
    """
    return not batch.logitsprocs_need_output_token_ids and any(
        type(processor) not in _OWN_PROCESSORS for processor in batch.logitsprocs.all
    )


def _with_entry_point_processors(batch: "InputBatch", on: frozenset[str]) -> frozenset[str]:
    """The features that are on with such processors, which must read what is certain.

    Upstream leaves placeholders for good in the lists that it gives them. Either they are
    readers like any other processor, or the lists are kept as upstream keeps them.
    """
    if "plugin-processors" in on:
        batch.logitsprocs_need_output_token_ids = True
        return on
    logger.info_once(
        "Readiness overlay: history, penalties, bad-words and thinking-budget are off, too, "
        "because plugin-processors is, and logits processors come from entry points."
    )
    return features.without("history", on)
