"""The base class of the features and fixes of a batch, and their verbs.

A verb means the same in every module. The live batch has the same verbs: it calls those of the
features that are on (:mod:`~vllm.v1.readiness.live`).

A verb that stands in for upstream's code returns a value, or None to fall back to upstream. Only
one feature answers such a verb. All other verbs return None.
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
    """A feature or fix of one InputBatch; each verb is a no-op by default.

    Args:
        batch: the batch.
    """

    #: Whether the feature also serves pooling models, which sample nothing.
    pooling: ClassVar[bool] = False

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    @classmethod
    def make(cls, live: "LiveBatch") -> "Self | None":
        """Make the feature for a live batch; None where it has nothing to do.

        Args:
            live: has made what this one needs.
        """
        return cls(live.batch)

    # At start-up

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate device memory that may not be free later, before vLLM profiles memory.

        Args:
            cache: states how much of the device's memory vLLM takes.
        """

    def warm_up(self) -> None:
        """Compile kernels and pin memory, which would otherwise stall the first request."""

    def choose_slots(self, runner: "GPUModelRunner") -> None:
        """Choose the KV cache groups whose slot mapping is computed; the groups are known."""

    # As the batch changes for a step

    def add_request(self, request: "CachedRequestState") -> None:
        """Take in a request that has been given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Let go of a request that is leaving its row.

        Args:
            request: the request, which may come back (preempted, or left out of a step).
            row: its row, which still holds what the request had there.
        """

    def idle(self) -> None:
        """Release what is held for requests: the batch is empty."""

    def move_row(self, source: int, target: int) -> None:
        """Clean up after ``condense`` has moved one row into an empty one."""

    def swap_rows(self, one: int, other: int) -> None:
        """Complete an exchange of two rows by ``swap_states``."""

    def clear_mask(self, row: int) -> None:
        """Clear the mask of allowed tokens that ``condense`` has copied into another row."""

    def swap_masks(self, one: int, other: int) -> bool | None:
        """Swap two rows' masks of allowed tokens, in place of upstream; True if done."""

    def cut(self, req_id: str, length: int) -> None:
        """Follow a cut: the runner is about to drop the end of an output.

        Args:
            req_id: a request in the batch.
            length: number of its output tokens and placeholders that are kept.
        """

    def advance(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> bool | None:
        """Update the runner's requests and its batch for a step, in place of upstream.

        Args:
            runner: has removed the requests that have finished.
            scheduled: the step.

        Returns:
            True if done.
        """

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Restore the state of a request that is about to join the batch again."""

    # As a step's inputs are prepared

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: "np.ndarray"
    ) -> "tuple[torch.Tensor, None] | None":
        """Prepare the inputs of a step, in place of upstream.

        Args:
            runner: its batch is updated.
            scheduled: the step.
            lengths: int32 [requests], each one's number of tokens.

        Returns:
            What ``_prepare_inputs`` returns; None to fall back to upstream.
        """

    def forget_step(self) -> None:
        """Have upstream prepare the next step: buffers may not hold what the last one left."""

    def find_previous(self, previous: "np.ndarray") -> bool | None:
        """Find each request's row in the step before, in place of upstream.

        Args:
            previous: [rows] row of each request; -1 for one without. Written here.

        Returns:
            True if done.
        """

    def count_tokens(self, runner: "GPUModelRunner") -> "np.ndarray | None":
        """Count the tokens that each request has; int [rows], or None to fall back to upstream."""

    def fill_input_ids(
        self,
        runner: "GPUModelRunner",
        scheduled: "SchedulerOutput",
        rows: int,
        tokens: int,
        ends: "np.ndarray",
    ) -> bool | None:
        """Put a step's tokens and drafts into ``input_ids`` on the device, in place of upstream.

        Args:
            runner: has sampled tokens on the device.
            scheduled: the step.
            rows: number of requests.
            tokens: number of tokens.
            ends: [rows] where each request's tokens end.

        Returns:
            True if done.
        """

    def count_drafts(
        self, drafts: "Drafts", counts: "np.ndarray", decoding: "np.ndarray"
    ) -> bool | None:
        """Count each request's drafts, in place of upstream.

        Args:
            drafts: of the step; each request is in the batch.
            counts: [rows] zeros; the number of drafts is written here,
            decoding: [rows] and here, where the prompt is computed.

        Returns:
            True if done.
        """

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: "np.ndarray", ends: "np.ndarray"
    ) -> "SpecDecodeMetadata | None":
        """Make the metadata of a step's drafts.

        Args:
            runner: its ``input_ids`` on the device are complete.
            counts: [rows] number of drafts.
            ends: [rows] where each request's tokens end.

        Returns:
            The metadata, or None to fall back to upstream.
        """

    def reuse_slots(self, shape: object, split: object) -> tuple[Any, Any] | None:
        """Return the slot mappings of a step, by KV cache group and by layer.

        Args:
            shape: of the step.
            split: how the step is split in two, if it is.

        Returns:
            The mappings, or None to fall back to upstream.
        """

    def keep_slots(self, shape: object, slots: tuple[Any, Any]) -> None:
        """Keep the slot mappings that upstream has made of a step that is not split."""

    def build_metadata(
        self, runner: "GPUModelRunner", shape: object, *special: object
    ) -> dict[str, Any] | None:
        """Build the attention metadata of a step.

        Args:
            runner: the runner.
            shape: of the step: what the description depends on, except the batch.
            special: reasons for upstream's code; each is None or False in a plain step.

        Returns:
            Metadata of each layer; None to fall back to upstream.
        """

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep upstream's description of a step for the next KV cache group."""

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark the positions behind a prompt of embeddings as tokens.

        Args:
            flags: [tokens] bool, whether the model is given a token; changed in place.
            rows: [tokens] row of each token.
            positions: [tokens] position of each token in its request.
        """

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Put each request's count of accepted drafts into its row.

        Args:
            runner: the counts of its last step have arrived.
            scheduled: the step.
        """

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as rows with drafts, where their state depends on it.

        Args:
            runner: its attention metadata is about to be built; not of a dummy run.
            drafted: whether the step has drafts.
            requests: number of rows, without padding.

        Returns:
            True if the metadata is to be built as that of a step with drafts.
        """

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """Zero the recurrent states of requests that begin with one token.

        Args:
            runner: its inputs are prepared.
            lengths: [requests] each one's number of tokens in the step.
        """

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """Decide whether a step is a uniform decode, in place of its shape.

        Args:
            runner: its inputs are prepared.
            longest: number of tokens of the longest request in the step.
            drafts: the step's drafts, if it has any.

        Returns:
            False if it is none; None if its shape decides.
        """

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Send the positions of M-RoPE or XD-RoPE, in place of upstream; True if done.

        Args:
            runner: the model runner.
            tokens: number of tokens of the step.
        """

    def lose_block_tables(self) -> None:
        """Note that the device has lost its block tables, as after it was asleep."""

    # As a step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: "torch.Tensor"
    ) -> bool | None:
        """Mask the logits of rows that have a grammar, in place of upstream.

        Args:
            scheduled: the step.
            grammars: the masks of its requests.
            logits: [positions, vocab], changed in place.

        Returns:
            True if done.
        """

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Follow the tokens that a step has sampled, on the device.

        Args:
            sampled: [requests, 1 + drafts] token ids on the device; -1 stands for a rejected
                draft, and everything behind a -1 is rejected.
            discarded: [at least requests] bool on the device: rows whose samples are dropped.
        """

    def rewind_generator(self, row: int) -> bool | None:
        """Restore the generator of a row whose sample is dropped; True if done."""

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor | None":
        """Compute the scores of a prompt, in place of logprobs.

        Args:
            sampler: the runner's.
            logits: [positions, vocab].

        Returns:
            float32 [positions, vocab], or None for logprobs.
        """

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """Mark all positions of a prompt as not computed, before its first chunk.

        Args:
            room: on the host, ids and logprobs of [positions, width] and ranks of [positions].
        """

    def take_part(self, runner: "GPUModelRunner") -> None:
        """Run the drafter of a rank that does not draft in this step, if others may.

        Args:
            runner: of the pipeline's last rank, with a drafter of any kind.
        """


#: The names of all verbs.
VERBS = frozenset(
    name for name, value in vars(Feature).items() if isfunction(value) and name[0] != "_"
)
