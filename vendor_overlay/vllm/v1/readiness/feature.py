"""Base class of a batch's features and fixes: all verbs, in the order of a step.

A verb means the same in every module. The live batch (:mod:`~vllm.v1.readiness.live`) has the same
verbs, and calls those of the features that are on. A verb that replaces upstream's code returns a
value, or None to fall back to upstream; only one feature answers it. All other verbs return None.
"""

# mirrors: nothing

from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from typing_extensions import Self
    from vllm.config import CacheConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.readiness.inputs.input_ids import Drafts
    from vllm.v1.readiness.live import LiveBatch
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Feature:
    """Feature or fix of one InputBatch; each verb is a no-op by default."""

    #: Whether the feature also serves pooling models, which sample nothing.
    pooling: ClassVar[bool] = False

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    @classmethod
    def make(cls, live: "LiveBatch") -> "Self | None":
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
        """Follow a request that is leaving ``row``, which still holds its state.

        It may come back: it was preempted, or left out of a step.
        """

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
        """Follow a truncation of the output of a request in the batch, just before it happens.

        ``length`` is the number of output tokens and placeholders that are kept.
        """

    def advance(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> bool | None:
        """Update the runner's requests and batch for a step, in place of upstream; True if done.

        Finished requests have been removed.
        """

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Restore the state of a request that is about to rejoin the batch."""

    # As a step's inputs are prepared

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: "np.ndarray"
    ) -> "tuple[torch.Tensor, None] | None":
        """Prepare the inputs of a step, in place of upstream.

        Args:
            runner: the model runner; its batch is updated.
            scheduled: the step.
            lengths: int32 [requests], tokens per request.

        Returns:
            The result of ``_prepare_inputs``, or None to fall back to upstream.
        """

    def forget_step(self) -> None:
        """Leave the next step to upstream: buffers may not hold the last step's values."""

    def find_previous(self, previous: "np.ndarray") -> bool | None:
        """Find each request's row in the previous step, in place of upstream; True if done.

        The rows are written into ``previous`` [rows]; -1 for a request without one.
        """

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
        """Fill ``input_ids`` on the device with tokens and drafts, in place of upstream.

        Args:
            runner: the model runner, with sampled tokens on the device.
            scheduled: the step.
            rows: number of requests.
            tokens: number of tokens.
            ends: [rows], the end of each request's tokens.

        Returns:
            True if done.
        """

    def count_drafts(
        self, drafts: "Drafts", counts: "np.ndarray", decoding: "np.ndarray"
    ) -> bool | None:
        """Count each request's drafts, in place of upstream; True if done.

        Args:
            drafts: the step's drafts, of requests in the batch.
            counts: [rows] zeros; receives the numbers of drafts.
            decoding: [rows]; receives the numbers of drafts of rows past their prompt.
        """

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: "np.ndarray", ends: "np.ndarray"
    ) -> "SpecDecodeMetadata | None":
        """Build the metadata of a step's drafts; None to fall back to upstream.

        Args:
            runner: the model runner; its ``input_ids`` on the device are complete.
            counts: [rows], drafts per row.
            ends: [rows], the end of each request's tokens.
        """

    def reuse_slots(self, shape: object, split: object) -> tuple[Any, Any] | None:
        """Return a step's slot mappings, by KV cache group and by layer; None to fall back.

        Args:
            shape: shape of the step.
            split: the ubatch split of the step, if any.
        """

    def keep_slots(self, shape: object, slots: tuple[Any, Any]) -> None:
        """Keep the slot mappings that upstream computed for an unsplit step."""

    def build_metadata(
        self, runner: "GPUModelRunner", shape: object, *special: object
    ) -> dict[str, Any] | None:
        """Build the attention metadata of a step, by layer; None to fall back to upstream.

        Args:
            runner: the model runner.
            shape: the step's parameters that the metadata depends on, except the batch.
            special: parameters that only upstream handles; each is None or False in a plain step.
        """

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep upstream's common metadata of a step for the next KV cache group."""

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark the positions after a prompt of embeddings as tokens.

        Args:
            flags: bool [tokens], whether the model reads a token id; changed in place.
            rows: [tokens], row of each token.
            positions: [tokens], position of each token in its request.
        """

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Gather accepted-draft counts into their rows; the last step's counts have arrived."""

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as drafted, where their recurrent state depends on it.

        Args:
            runner: the model runner, about to build attention metadata; not of a dummy run.
            drafted: whether the step has drafts.
            requests: number of rows, without padding.

        Returns:
            True to build the metadata of a step with drafts.
        """

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """Zero the recurrent states of requests that begin with one token.

        ``lengths`` is [requests], tokens per request in the step, whose inputs are prepared.
        """

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """Return False if a step is no uniform decode; None to decide by its shape.

        Args:
            runner: the model runner; its inputs are prepared.
            longest: tokens of the longest request in the step.
            drafts: the step's drafts, if any.
        """

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Send a step's M-RoPE or XD-RoPE positions, in place of upstream; True if done."""

    def lose_block_tables(self) -> None:
        """Invalidate the device's block tables, which sleep mode discards."""

    # As a step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: "torch.Tensor"
    ) -> bool | None:
        """Mask the logits of rows with a grammar, in place of upstream; True if done.

        Args:
            scheduled: the step.
            grammars: bitmasks of its requests.
            logits: [positions, vocab], changed in place.
        """

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Follow the tokens sampled in a step, on the device.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; a row ends at its first -1.
            discarded: bool [at least requests] on the device, rows whose samples are dropped.
        """

    def rewind_generator(self, row: int) -> bool | None:
        """Restore the generator of a row whose sample is dropped; True if done."""

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor | None":
        """Compute a prompt's scores from logits [positions, vocab], in place of logprobs.

        Returns:
            float32 [positions, vocab], or None for logprobs.
        """

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """Mark all positions of a prompt as not computed, before its first chunk.

        ``room`` is on the host: ids and logprobs of [positions, width], ranks of [positions].
        """

    def take_part(self, runner: "GPUModelRunner") -> None:
        """Run the drafter on a rank that does not draft in this step, if other ranks may.

        The runner is one of the pipeline's last rank, with a drafter of any kind.
        """


#: The names of all verbs.
VERBS = frozenset(
    name for name, value in vars(Feature).items() if isfunction(value) and name[0] != "_"
)
