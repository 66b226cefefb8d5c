"""The fixes that the runner and its batch call by verbs of their own.

====================  ============================  ========================================
verb                  called by                     moment
====================  ============================  ========================================
clear_mask            InputBatch.condense           the mask of a row has been copied
swap_masks            InputBatch.swap_states        two rows are being exchanged
mark_tokens           runner._prepare_inputs        the flags of tokens have been gathered
gather_accepted       runner._prepare_inputs        accepted drafts have been counted
include_undrafted     runner, attention metadata    a step's metadata is to be built
empty_states          runner.execute_model          the inputs are prepared
force_uniform_decode  runner.execute_model          before a CUDA graph is chosen
rewind                runner._bookkeeping_sync      a row's sample is dropped
take_part             runner.sample_tokens          where no drafts are proposed
prompt_scores         runner, prompt logprobs       in place of computing them
mark_prompt           runner, prompt logprobs       before a prompt's first chunk
====================  ============================  ========================================

Fixes that follow a batch by the verbs of :class:`~vllm.v1.readiness.feature.Feature` are
features of :class:`~vllm.v1.readiness.live.LiveBatch`. Those of the scheduler, the samplers and
the KV cache have no batch, and ask the switch themselves.
"""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness import features
from vllm.v1.readiness.inputs import drafter_ranks, undrafted_rows
from vllm.v1.readiness.inputs.accepted_counts import AcceptedCounts
from vllm.v1.readiness.inputs.empty_states import EmptyStates
from vllm.v1.readiness.inputs.prompt_embeds import PromptEmbeds
from vllm.v1.readiness.inputs.uniform_decode import UniformDecode
from vllm.v1.readiness.outputs import cached_prompt_logprobs
from vllm.v1.readiness.sample import prompt_logits
from vllm.v1.readiness.sample.allowed_tokens import AllowedTokens
from vllm.v1.readiness.sample.cpu_seeds import CpuSeeds

if TYPE_CHECKING:
    import numpy as np
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Fixes:
    """The fixes of one InputBatch; what is off falls back to upstream.

    Args:
        batch: the batch; not used if nothing is on.
        num_spec_tokens: draft tokens a request and step.
        on: the features and fixes that are on.
    """

    def __init__(self, batch: "InputBatch", num_spec_tokens: int, on: frozenset[str]) -> None:
        self.batch = batch
        self.on = on
        self.allowed_tokens = AllowedTokens(batch) if features.ALLOWED_TOKENS in on else None
        self.prompt_embeds = PromptEmbeds(batch) if features.PROMPT_EMBEDS in on else None
        counts = num_spec_tokens > 0 and features.ACCEPTED_COUNTS in on
        self.accepted = AcceptedCounts(batch) if counts else None
        self.empty = EmptyStates() if features.EMPTY_STATES in on else None
        self.uniform = UniformDecode() if features.UNIFORM_DECODE in on else None
        seeds = features.CPU_SEEDS in on and batch.device.type == "cpu"
        self.cpu_seeds = CpuSeeds(batch) if seeds else None

    def clear_mask(self, row: int) -> None:
        """See :meth:`AllowedTokens.clear`."""
        if self.allowed_tokens is not None:
            self.allowed_tokens.clear(row)

    def swap_masks(self, one: int, other: int) -> bool:
        """See :meth:`AllowedTokens.swap`.

        Returns:
            True if handled here; False to fall back to upstream.
        """
        if self.allowed_tokens is None:
            return False
        self.allowed_tokens.swap(one, other)
        return True

    def mark_tokens(self, flags: "np.ndarray", rows: "np.ndarray", positions: "np.ndarray") -> None:
        """See :meth:`PromptEmbeds.mark`."""
        if self.prompt_embeds is not None:
            self.prompt_embeds.mark(flags, rows, positions)

    def gather_accepted(self, runner: "GPUModelRunner", scheduled: "SchedulerOutput") -> None:
        """See :meth:`AcceptedCounts.gather`."""
        if self.accepted is not None:
            self.accepted.gather(runner, scheduled)

    def include_undrafted(self, runner: "GPUModelRunner", drafted: bool, requests: int) -> bool:
        """See :func:`undrafted_rows.include`."""
        if features.UNDRAFTED_ROWS not in self.on:
            return drafted
        return undrafted_rows.include(runner, drafted, requests)

    def empty_states(self, runner: "GPUModelRunner", lengths: "np.ndarray") -> None:
        """See :meth:`EmptyStates.empty`."""
        if self.empty is not None:
            self.empty.empty(runner, lengths)

    def force_uniform_decode(
        self, runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
    ) -> bool | None:
        """See :meth:`UniformDecode.force`."""
        return None if self.uniform is None else self.uniform.force(runner, longest, drafts)

    def rewind(self, row: int) -> bool:
        """See :meth:`CpuSeeds.rewind`."""
        return self.cpu_seeds is not None and self.cpu_seeds.rewind(row)

    def take_part(self, runner: "GPUModelRunner") -> None:
        """See :func:`drafter_ranks.take_part`."""
        if features.DRAFTER_RANKS in self.on:
            drafter_ranks.take_part(runner)

    def prompt_scores(self, sampler: "Sampler", logits: "torch.Tensor") -> "torch.Tensor":
        """See :func:`prompt_logits.scores`."""
        return prompt_logits.scores(sampler, logits, features.PROMPT_LOGITS in self.on)

    def mark_prompt(self, room: "LogprobsTensors") -> None:
        """See :func:`cached_prompt_logprobs.mark`."""
        if features.CACHED_PROMPT_LOGPROBS in self.on:
            cached_prompt_logprobs.mark(room)
