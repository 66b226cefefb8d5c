"""Base class of a batch's features and fixes: all verbs, in the order of a step.

A verb means the same in every module. The live batch (:mod:`~vllm.v1.readiness.live`) has the same
verbs, and calls those of the features that are on. A verb that replaces upstream's code returns a
value, or None to fall back to upstream; only one feature answers it. All other verbs return None.
"""

# mirrors: nothing

from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self
    from vllm.config import CacheConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


F = TypeVar("F", bound="Feature")


class Live(Protocol):
    """The live batch, as far as its features use it.

    Attributes:
        batch: the InputBatch, as a weak proxy.
        num_spec_tokens: draft tokens per request and step.
        serving: features and fixes that are on.
        requests: the requests in the batch, by id.
    """

    batch: "InputBatch"
    num_spec_tokens: int
    serving: frozenset[str]
    requests: "dict[str, CachedRequestState]"

    @property
    def rows(self) -> "list[list[int] | None]":
        """Output list of each row."""

    def find(self, kind: type[F]) -> F | None:
        """Return the feature of this class, or None if it is off."""

    def settle_older(self) -> None:
        """Settle every step but the newest."""

    def settle_all(self, owner: str) -> None:
        """Settle every row, waiting on behalf of ``owner``."""


class Feature:
    """Feature or fix of one InputBatch; each verb is a no-op by default."""

    #: Whether the feature also serves pooling models, which sample nothing.
    pooling: ClassVar[bool] = False

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    @classmethod
    def make(cls, live: "Live") -> "Self | None":
        """Create the feature, after the features that it needs; None where it does not apply."""
        return cls(live.batch)

    # At start-up

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate device memory that may not be free later, before vLLM profiles memory."""

    def warm_up(self) -> None:
        """Compile kernels and pin memory, which would otherwise stall the first request."""

    def choose_slots(self, runner: "GPUModelRunner") -> None:
        """Choose the KV cache groups whose slot mapping is computed, once the groups are known."""

    # As the batch changes for a step

    def add_request(self, request: "CachedRequestState") -> None:
        """Follow a request that was given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Follow a request that leaves ``row``, which still holds its state; it may come back."""

    def idle(self) -> None:
        """Release all state held for requests: the batch is empty."""

    def move_row(self, source: int, target: int) -> None:
        """Follow ``condense``, which has moved a row into an empty one."""

    def swap_rows(self, one: int, other: int) -> None:
        """Follow ``swap_states``, which has exchanged two rows."""

    def clear_mask(self, row: int) -> None:
        """Clear a mask of allowed tokens that ``condense`` has copied into another row."""

    def swap_masks(self, one: int, other: int) -> bool | None:
        """Swap two rows' masks of allowed tokens, in place of upstream; True if done."""

    def cut(self, req_id: str, length: int) -> None:
        """Follow a cut to ``length`` output tokens and placeholders, just before it happens."""

    def advance(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> bool | None:
        """Update the runner's requests and batch for a step, in place of upstream; True if done."""

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Restore the state of a request that is about to rejoin the batch."""

    # As a step's inputs are prepared

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: "np.ndarray"
    ) -> "tuple[torch.Tensor, None] | None":
        """Prepare a step's inputs, in place of upstream; return the result of ``_prepare_inputs``.

        ``lengths`` is int32 [requests], tokens per request. The runner's batch is updated.
        """

    def forget_step(self) -> None:
        """Leave the next step to upstream: buffers may not hold the last step's values."""

    def find_previous(self, previous: "np.ndarray") -> bool | None:
        """Write each request's previous row, or -1, into ``previous`` [rows]; True if done."""

    def count_tokens(self, runner: "GPUModelRunner") -> "np.ndarray | None":
        """Count each request's tokens, int [rows]; None to fall back to upstream."""

    def fill_input_ids(
        self,
        runner: "GPUModelRunner",
        scheduled: "SchedulerOutput",
        rows: int,
        tokens: int,
        ends: "np.ndarray",
    ) -> bool | None:
        """Fill ``input_ids`` on the device, in place of upstream; True if done.

        ``rows`` requests have ``tokens`` tokens; ``ends`` [rows] are the ends of each request's.
        """

    def count_drafts(
        self, drafts: Mapping[str, Sequence[int]], counts: "np.ndarray", decoding: "np.ndarray"
    ) -> bool | None:
        """Count each request's drafts into zeroed ``counts`` [rows]; True if done.

        ``decoding`` [rows] receives the counts of rows past their prompt.
        """

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: "np.ndarray", ends: "np.ndarray"
    ) -> "SpecDecodeMetadata | None":
        """Build the metadata of a step's drafts; None to fall back to upstream.

        ``counts`` [rows] are the drafts per row, ``ends`` [rows] the ends of each request's tokens.
        """

    def reuse_slots(self, shape: object, split: object) -> tuple[Any, Any] | None:
        """Return a step's slot mappings, by KV cache group and by layer; None to fall back.

        ``split`` is the step's split into ubatches, if any.
        """

    def keep_slots(self, shape: object, slots: tuple[Any, Any]) -> None:
        """Keep the slot mappings that upstream computed for an unsplit step."""

    def build_metadata(
        self, runner: "GPUModelRunner", shape: object, *special: object
    ) -> dict[str, Any] | None:
        """Build the attention metadata of a step, by layer; None to fall back to upstream.

        It depends on ``shape`` and the batch. Each of ``special`` is None or False in a plain step.
        """

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep upstream's common metadata of a step for the next KV cache group."""

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark the positions after a prompt of embeddings in bool ``flags`` [tokens].

        ``rows`` and ``positions`` [tokens] are each token's row, and its position in the request.
        """

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Gather accepted-draft counts, which have arrived, into their rows."""

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as drafted, where their recurrent state depends on it.

        Returns True to build the metadata of a step with drafts. ``requests`` excludes padding.
        """

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """Zero the recurrent states of requests that begin with one token.

        ``lengths`` is [requests], tokens per request in the step, whose inputs are prepared.
        """

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """Return False if a step is no uniform decode; None to decide by its shape.

        ``longest`` is the number of tokens of the longest request in the step.
        """

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Send a step's M-RoPE or XD-RoPE positions, in place of upstream; True if done."""

    def lose_block_tables(self) -> None:
        """Invalidate the device's block tables, which sleep mode discards."""

    # As a step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: "torch.Tensor"
    ) -> bool | None:
        """Mask logits [positions, vocab] of rows with a grammar, in place; True if done."""

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Follow a step's tokens [requests, 1 + drafts]; a row ends at its first -1.

        ``discarded``, bool [at least requests], marks rows whose samples are dropped. Both are on
        the device.
        """

    def rewind_generator(self, row: int) -> bool | None:
        """Restore the generator of a row whose sample is dropped; True if done."""

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor | None":
        """Compute float32 scores from a prompt's logits [positions, vocab]; None for logprobs."""

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """Mark all positions of a prompt as not computed, before its first chunk."""

    def take_part(self, runner: "GPUModelRunner") -> None:
        """Run the drafter on a rank that does not draft in this step, if other ranks may."""


#: The names of all verbs.
VERBS = frozenset(
    name for name, value in vars(Feature).items() if isfunction(value) and name[0] != "_"
)
