"""Base class of features and fixes, whose methods (verbs) are in the order of a step.

A verb has the same meaning in every module. The live batch (:mod:`~vllm.v1.readiness.live`) has the
same verbs, and forwards each call to the enabled features. A verb that replaces upstream's code
returns a value, or None to fall back to upstream. At most one feature returns a value. All other
verbs return None.
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
        batch: weak proxy of the InputBatch.
        num_spec_tokens: number of draft tokens per request and step.
        serving: features and fixes that are on.
        requests: the requests in the batch, by id.
    """

    batch: "InputBatch"
    num_spec_tokens: int
    serving: frozenset[str]
    requests: "dict[str, CachedRequestState]"

    @property
    def rows(self) -> "list[list[int] | None]":
        """Output token ids of each row."""

    def find(self, kind: type[F]) -> F | None:
        """Return the feature of this class; None if it is off."""

    def settle_older(self) -> None:
        """Settle all steps but the newest."""

    def settle_all(self, owner: str) -> None:
        """Settle all rows; ``owner`` names the fence."""


class Feature:
    """Feature or fix of one InputBatch. Each verb is a no-op by default."""

    #: Whether the feature also serves pooling models, which sample nothing.
    pooling: ClassVar[bool] = False

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch

    @classmethod
    def make(cls, live: "Live") -> "Self | None":
        """Create the feature after those sorted before it; None if it does not apply."""
        return cls(live.batch)

    # At start-up

    def reserve(self, cache: "CacheConfig") -> None:
        """Allocate device memory. Called before memory profiling, which then accounts for it."""

    def warm_up(self) -> None:
        """Compile kernels and allocate pinned memory before the first request."""

    def compile_kernels(self, runner: "GPUModelRunner") -> None:
        """Compile all kernels that requests may need. Called once, at the end of start-up."""

    def choose_slots(self, runner: "GPUModelRunner") -> None:
        """Choose the KV cache groups that need slot mappings. Called once the groups are known."""

    # As the batch changes for a step

    def add_request(self, request: "CachedRequestState") -> None:
        """Start tracking a request that was given a row."""

    def remove_request(self, request: "CachedRequestState", row: int) -> None:
        """Stop tracking a request that leaves its row. The request may come back later.

        The row still holds the request's token ids and counts.
        """

    def idle(self) -> None:
        """Release all state held for requests. Called when the batch is empty."""

    def move_row(self, source: int, target: int) -> None:
        """Move the state of row ``source`` to the empty row ``target``. Called by ``condense``."""

    def swap_rows(self, one: int, other: int) -> None:
        """Swap the states of two rows. Called by ``swap_states``."""

    def clear_mask(self, row: int) -> None:
        """Clear a row's allowed-token mask. Called after ``condense`` has moved the row."""

    def swap_masks(self, one: int, other: int) -> bool | None:
        """Swap the allowed-token masks of two rows, instead of upstream; True if done."""

    def cut(self, req_id: str, length: int) -> None:
        """Prepare for truncating a request to ``length`` output tokens, placeholders included."""

    def advance(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput"
    ) -> "SchedulerOutput | None":
        """Update requests that continue; return the step without them, or None to fall back."""

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Restore the state of a request that is about to rejoin the batch."""

    # As a step's inputs are prepared

    def prepare_inputs(
        self, runner: "GPUModelRunner", scheduled: "SchedulerOutput", lengths: "np.ndarray"
    ) -> "tuple[torch.Tensor, None] | None":
        """Prepare a step's inputs, and return the result of ``_prepare_inputs``; None to fall back.

        ``lengths``, int32 [requests], is the number of tokens per request in the step.
        """

    def forget_step(self) -> None:
        """Discard state of the last step. Called after a dummy run, which overwrites buffers."""

    def find_previous(self, previous: "np.ndarray") -> bool | None:
        """Write each request's previous row, or -1, to ``previous`` [rows]; True if done."""

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
        """Write each request's number of drafts to ``counts`` [rows], which is zero; True if done.

        Rows past their prompt have the number written to ``decoding`` [rows], too.
        """

    def draft_metadata(
        self, runner: "GPUModelRunner", counts: "np.ndarray", ends: "np.ndarray"
    ) -> "SpecDecodeMetadata | None":
        """Build a step's speculative decoding metadata; None to fall back to upstream.

        ``counts`` [rows] is the number of drafts per row, and ``ends`` [rows] the index after each
        row's last token.
        """

    def make_slots(
        self, runner: "GPUModelRunner", padded: int, split: object
    ) -> "tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]] | None":
        """Return a step's slot mappings, by KV cache group and by layer; None to fall back.

        ``padded`` is the number of tokens with padding. ``split`` is the ubatch slices, or None.
        """

    def build_metadata(
        self,
        runner: "GPUModelRunner",
        shape: tuple[int, int, int, int | None, int | None],
        *special: object,
    ) -> dict[str, Any] | None:
        """Build a step's attention metadata, by layer; None to fall back to upstream.

        ``shape`` is the number of tokens, the number of requests, ``max_query_len``, and the
        numbers of tokens and requests with padding (None without padding). ``special`` holds
        upstream's other arguments, such as ubatch slices; each is None or False in a plain step.
        """

    def keep_metadata(self, common: "CommonAttentionMetadata") -> None:
        """Keep the common metadata that upstream built. Called per KV cache group, in order."""

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """Set ``flags``, bool [tokens], for tokens after the prompt: they are token ids.

        ``rows`` and ``positions`` [tokens] are each token's row and its position in the request.
        """

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """Write each request's number of accepted tokens to its row, on the host."""

    def include_undrafted(
        self, runner: "GPUModelRunner", drafted: bool, requests: int
    ) -> bool | None:
        """Count decoding rows without drafts as drafted, if their Mamba state depends on it.

        ``drafted`` is whether the step has drafts. ``requests`` excludes padding. Returns True to
        build metadata as for a step with drafts; None to fall back to upstream.
        """

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """Zero the Mamba states of requests whose first step has one token.

        ``lengths`` [requests] is the number of tokens per request in the step.
        """

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """Return False if a step is not a uniform decode; None to fall back to upstream.

        ``longest`` is the step's ``max_query_len``.
        """

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Copy a step's M-RoPE or XD-RoPE positions to the device; True if done."""

    def lose_block_tables(self) -> None:
        """Mark the block tables on the device as lost. Called when sleep mode discards them."""

    # As a step is sampled

    def apply_grammars(
        self, scheduled: "SchedulerOutput", grammars: "GrammarOutput", logits: "torch.Tensor"
    ) -> bool | None:
        """Apply grammar bitmasks to ``logits`` [positions, vocab] in place; True if done."""

    def observe_sampled(self, sampled: "torch.Tensor", discarded: "torch.Tensor") -> None:
        """Update device state with the tokens that a step has sampled.

        ``sampled`` [requests, 1 + drafts] is padded with -1. ``discarded``, bool [>= requests],
        marks rows whose sampled tokens are dropped. Both are on the device.
        """

    def rewind_generator(self, row: int) -> bool | None:
        """Rewind the generator of a row whose sampled token is dropped; True if done."""

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor | None":
        """Return prompt logits to report as scores, float32 [positions, vocab].

        ``logits`` is [positions, vocab]. Returns None to report logprobs.
        """

    def fill_prompt(
        self,
        runner: "GPUModelRunner",
        request: "CachedRequestState",
        hidden: "torch.Tensor",
        prompt: "torch.Tensor",
    ) -> bool | None:
        """Compute a prefill chunk's prompt logprobs into the request's room; True if done.

        ``hidden`` [positions, hidden size] holds the hidden states of the positions from
        ``num_computed_tokens`` on. ``prompt`` [prompt length] holds the prompt's token ids. Both
        are on the device.
        """

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """Mark all positions in prompt logprobs ``room`` as not computed, before the prefill."""

    def caps_drafts(self, runner: "GPUModelRunner") -> bool | None:
        """Return True if the drafter caps each request's drafts by max_model_len; else None."""

    def take_part(self, runner: "GPUModelRunner") -> None:
        """Run the drafter on a dummy token, if this rank does not draft but other ranks may."""


#: The names of all verbs.
VERBS = frozenset(
    name for name, value in vars(Feature).items() if isfunction(value) and name[0] != "_"
)
