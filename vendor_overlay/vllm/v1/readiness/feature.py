"""Base class of a batch's features and fixes, with all verbs in the order of a step.

A verb means the same in every module. The live batch (:mod:`~vllm.v1.readiness.live`) has the same
verbs, and forwards each call to the enabled features. A verb that replaces upstream's code returns
a value, or None to fall back to upstream. At most one feature returns a value. All other verbs
return None.
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
    """Interface of the live batch for its features.

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
    """Feature or fix of one InputBatch. Each verb is a no-op by default."""

    #: Whether the feature also serves pooling models, which sample nothing.
    pooling: ClassVar[bool] = False

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    @classmethod
    def make(cls, live: "Live") -> "Self | None":
        """Create the feature; None if it does not apply. Its dependencies exist already."""
        return cls(live.batch)

    # At start-up

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate device memory that may not be free later. Called before memory profiling."""

    def warm_up(self) -> None:
        """Compile kernels and pin memory, so that the first request does not stall."""

    def compile_kernels(self, runner: "GPUModelRunner") -> None:
        """Compile the kernels that requests can reach. Called once, at the end of start-up."""

    def choose_slots(self, runner: "GPUModelRunner") -> None:
        """Choose the KV cache groups that need a slot mapping. Called once the groups exist."""

    # As the batch changes for a step

    def add_request(self, request: "CachedRequestState") -> None:
        """Start tracking a request that was given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Stop tracking a request that leaves ``row`` and may come back.

        The row still holds the request's token ids and counts.
        """

    def idle(self) -> None:
        """Release all state held for requests. Called when the batch is empty."""

    def move_row(self, source: int, target: int) -> None:
        """Move a row's state to the empty row ``target``. Called by ``condense``."""

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the states of two rows. Called by ``swap_states``."""

    def clear_mask(self, row: int) -> None:
        """Clear a row's allowed-token mask after ``condense`` has copied it to another row."""

    def swap_masks(self, one: int, other: int) -> bool | None:
        """Swap two rows' allowed-token masks, instead of upstream; True if done."""

    def cut(self, req_id: str, length: int) -> None:
        """Prepare for truncating a request to ``length`` output tokens, placeholders included."""

    def advance(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput"
    ) -> "SchedulerOutput | None":
        """Update the requests that continue, instead of upstream.

        Returns the step without these requests, or None to fall back to upstream.
        """

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Restore the state of a request that is about to rejoin the batch."""

    # As a step's inputs are prepared

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: "np.ndarray"
    ) -> "tuple[torch.Tensor, None] | None":
        """Prepare a step's inputs and return ``_prepare_inputs``'s result; None to fall back.

        ``lengths``, int32 [requests], is the number of tokens per request in the step.
        """

    def forget_step(self) -> None:
        """Derive nothing from the last step, because a dummy run has overwritten its buffers."""

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
        """Fill ``input_ids`` on the device, instead of upstream; True if done.

        ``rows`` and ``tokens`` are the numbers of requests and tokens in the step. ``ends`` [rows]
        is the index after each request's last token.
        """

    def count_drafts(
        self, drafts: Mapping[str, Sequence[int]], counts: "np.ndarray", decoding: "np.ndarray"
    ) -> bool | None:
        """Count each request's drafts into zeroed ``counts`` [rows]; True if done.

        ``decoding`` [rows] receives the count of each row that is past its prompt.
        """

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: "np.ndarray", ends: "np.ndarray"
    ) -> "SpecDecodeMetadata | None":
        """Build the metadata of a step's drafts; None to fall back to upstream.

        ``counts`` [rows] is the number of drafts per row, and ``ends`` [rows] the index after each
        row's last token.
        """

    def make_slots(
        self, runner: "GPUModelRunner", padded: int, split: object
    ) -> "tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]] | None":
        """Make a step's slot mappings, by KV cache group and by layer; None to fall back.

        ``padded`` is the number of tokens with padding. ``split`` is the step's division into
        ubatches, or None.
        """

    def build_metadata(
        self,
        runner: "GPUModelRunner",
        shape: tuple[int, int, int, int | None, int | None],
        *special: object,
    ) -> dict[str, Any] | None:
        """Build the attention metadata of a step, by layer; None to fall back to upstream.

        ``shape``: numbers of tokens and requests, tokens of the longest request, and numbers of
        tokens and requests with padding, or None without padding. In a plain step each of
        ``special`` is None or False.
        """

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep upstream's common metadata. Called once per KV cache group, in order."""

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Mark the positions after prompts as token ids, in bool ``flags`` [tokens].

        ``rows`` and ``positions`` [tokens] are each token's row and its position in the request.
        """

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Write each request's accepted-draft count into its row. The counts are on the host."""

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as drafted, if their recurrent state depends on it.

        ``drafted``: whether the step has drafts; ``requests`` excludes padding. Returns True to
        build the metadata of a step with drafts, and None to fall back to upstream.
        """

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """Zero the recurrent states of requests whose first step has one token.

        ``lengths`` [requests] is the number of tokens per request in the step.
        """

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """Return False if a step is not a uniform decode; None to decide by its shape.

        ``longest`` is the number of tokens of the longest request in the step.
        """

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Send a step's M-RoPE or XD-RoPE positions, instead of upstream; True if done."""

    def lose_block_tables(self) -> None:
        """Invalidate the device's block tables, which sleep mode discards."""

    # As a step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: "torch.Tensor"
    ) -> bool | None:
        """Mask logits [positions, vocab] in place for rows with a grammar; True if done."""

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Update the state with a step's tokens [requests, 1 + drafts], padded with -1.

        Both are on the device. ``discarded``, bool [>= requests], marks rows with dropped samples.
        """

    def rewind_generator(self, row: int) -> bool | None:
        """Restore the generator of a row whose sample is dropped; True if done."""

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor | None":
        """Return a prompt's logits, float32 [positions, vocab]; None to compute logprobs."""

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """Mark all prompt positions in ``room`` as not computed. Called before the prefill."""

    def take_part(self, runner: "GPUModelRunner") -> None:
        """Run the drafter on a rank that does not draft in this step, if other ranks may draft."""


#: The names of all verbs.
VERBS = frozenset(
    name for name, value in vars(Feature).items() if isfunction(value) and name[0] != "_"
)
