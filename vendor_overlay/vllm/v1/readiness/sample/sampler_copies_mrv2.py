"""Model Runner V2's sampler without needless copies of the logits.

Upstream copies all logits to float32 on every step. Here a plan per batch records whether any
request's parameters change the logits. If not, the sampler's kernels load the logits directly and
convert them to float32, which is exact. Otherwise the logits are processed in place if they have
the dtype and layout of upstream's copy and the raw logits are not read later. Copying only the rows
to process was measured, and was not faster.

The logits are copied if any request was not passed to :meth:`SamplerCopies.add_request`. This
includes the profile run, whose peak memory stays the same as in upstream.
"""

# mirrors: vllm.v1.worker.gpu.sample.sampler:Sampler
# mirrors: vllm.v1.worker.gpu.sample.states:SamplingStates
# mirrors: vllm.v1.worker.gpu.sample.gumbel:gumbel_sample
# mirrors: vllm.v1.worker.gpu.sample.gumbel:gumbel_block_argmax
# mirrors: vllm.v1.worker.gpu.sample.gumbel:_gumbel_sample_kernel
# mirrors: vllm.v1.worker.gpu.sample.penalties:PenaltiesState
# mirrors: vllm.v1.worker.gpu.sample.penalties:use_penalty
# mirrors: vllm.v1.worker.gpu.sample.bad_words:BadWordsState
# mirrors: vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState
# mirrors: vllm.v1.worker.gpu.sample.min_p:apply_min_p
# mirrors: vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:rejection_sample
# mirrors: vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_compute_block_stats_kernel
# mirrors: vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_rejection_kernel
# mirrors: vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_resample_kernel

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler


class Handling(Enum):
    """How to process a batch's logits."""

    AS_IS = auto()  #: sample without processing
    IN_PLACE = auto()  #: process in place
    COPY = auto()  #: copy to float32 and process, like upstream


@dataclass(frozen=True)
class Plan:
    """Properties of a batch that decide how to process its logits."""

    changes_logits: bool  # some request's parameters change the logits
    greedy: bool  # every request is greedy
    raw_logprobs: bool  # logprobs of the raw logits are computed after processing
    processed_logprobs: bool  # logprobs of the processed logits are computed


def attach(sampler: "Sampler", max_num_reqs: int) -> None:
    """Attach plans to a sampler in its constructor."""
    # A derived class may change the state that the plans read.
    on = registry.SAMPLER_COPIES in switch.enabled() and type(sampler).__bases__ == (object,)
    setattr(sampler, subclasses.ATTRIBUTE, SamplerCopies(sampler, max_num_reqs, on))


def of(sampler: "Sampler") -> "SamplerCopies":
    """Return the plans attached to a sampler, or else disabled plans."""
    return subclasses.attached(sampler, SamplerCopies, lambda: SamplerCopies(sampler, 0, on=False))


class SamplerCopies:
    """Plans of one sampler, whose states have ``max_num_reqs`` entries."""

    def __init__(self, sampler: "Sampler", max_num_reqs: int, on: bool) -> None:
        self.sampler = sampler
        self.on = on
        self._added = np.zeros(max_num_reqs, dtype=bool)
        # Indices of the newest batch's requests (as bytes), and the plan of that batch.
        self._batch: bytes | None = None
        self._plan: Plan | None = None

    def add_request(self, req_idx: int) -> None:
        """Mark ``req_idx`` as known, once the sampler's states hold the request's parameters."""
        if self.on:
            self._added[req_idx] = True
            self._batch = None

    def decide(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> Handling:
        """Choose how to process the logits [positions, vocab].

        ``idx_mapping_np``, int32 [requests], are the requests' indices in the sampler's states.
        """
        plan = self._plan_of(idx_mapping_np)
        if plan is None:
            self._warm_up(logits, idx_mapping_np)
            return Handling.COPY
        # Whether the logits have the dtype and layout of upstream's copy.
        aligned = logits.is_contiguous() and logits.data_ptr() % 16 == 0
        like_copy = logits.dtype == torch.float32 and aligned
        if plan.changes_logits:
            in_place = like_copy and not plan.raw_logprobs
            return Handling.IN_PLACE if in_place else Handling.COPY
        if like_copy:
            return Handling.AS_IS
        if logits.stride(-1) != 1 or plan.processed_logprobs:
            return Handling.COPY  # sums and the order of ties may depend on the dtype
        # Verifying drafts sums over the logits of rows that are not greedy.
        sums = not plan.greedy and len(logits) != len(idx_mapping_np)
        return Handling.COPY if sums else Handling.AS_IS

    def _warm_up(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> None:
        """Compile the kernels for uncopied logits, which upstream's dummy runs do not launch."""
        if not self.on or logits.stride(-1) != 1 or len(logits) != len(idx_mapping_np):
            return
        zeros = torch.zeros(2, dtype=torch.int32, device=logits.device)
        positions = zeros.to(torch.int64)
        states = self.sampler.sampling_states
        gumbel_sample(
            logits[:1],
            zeros[:1],
            states.temperature.gpu,
            states.seeds.gpu,
            positions[:1],
            apply_temperature=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        drafts = self.sampler.num_speculative_tokens - 1
        if drafts > 0 and len(logits) > 1:
            counting = torch.arange(0, 4, 2, dtype=torch.int32, device=logits.device)
            rejection_sample(
                target_logits=logits[:2],
                draft_logits=None,
                draft_sampled=zeros,
                cu_num_logits=counting,
                pos=positions,
                idx_mapping=zeros[:1],
                expanded_idx_mapping=zeros,
                expanded_local_pos=counting // 2,
                temperature=states.temperature.gpu,
                seed=states.seeds.gpu,
                num_speculative_steps=drafts,
                use_fp64=self.sampler.use_fp64_gumbel,
            )

    def _plan_of(self, idx_mapping_np: np.ndarray) -> Plan | None:
        """Return the batch's plan; None if any of its requests is unknown."""
        if not self.on:
            return None
        batch = idx_mapping_np.tobytes()
        if batch != self._batch:
            self._batch = batch
            known = bool(self._added[idx_mapping_np].all())
            self._plan = self._make_plan(idx_mapping_np) if known else None
        return self._plan

    def _make_plan(self, places: np.ndarray) -> Plan:
        sampler = self.sampler
        states = sampler.sampling_states
        temperature = states.temperature.np[places]
        changed = (
            sampler.logit_bias_state.use_logit_bias[places]
            | sampler.penalties_state.use_penalty[places]
            | (sampler.bad_words_state.num_bad_words.np[places] != 0)
            | ((temperature != 0.0) & (temperature != 1.0))
            | (states.min_p.np[places] != 0.0)
            | (states.top_k.np[places] != states.vocab_size)
            | (states.top_p.np[places] != 1.0)
        )
        requested = (
            states.max_num_logprobs(places) != NO_LOGPROBS
            or sampler.logprob_token_ids_state.max_num_token_ids(places) > 0
        )
        processed = requested and sampler.logprobs_mode == "processed_logprobs"
        return Plan(
            changes_logits=bool(changed.any()),
            greedy=bool((temperature == 0.0).all()),
            raw_logprobs=requested and not processed,
            processed_logprobs=processed,
        )
