"""Model Runner V2's sampler without needless copies of the logits.

Upstream copies all logits to float32 on every step. Here a plan a batch says whether anything
that the requests ask for will change logits. Where nothing will, the logits are sampled from
as they are: the kernels convert to float32 as they load, which is exact. Where something
will, they are processed in place if they already are what upstream's copy would be, and
nobody reads them as they were. Taking apart the few rows that need processing was measured,
and was not faster.

A row whose request was not added here takes upstream's path, and so does all of a batch
with it: the profile run's among them, so that its peak of memory stays upstream's.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.readiness import features, subclasses, switch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler


class Handling(Enum):
    """What becomes of a batch's logits."""

    AS_IS = auto()  #: they are sampled from as they are
    IN_PLACE = auto()  #: they are processed where they are
    COPY = auto()  #: a copy is processed, as upstream does


@dataclass(frozen=True)
class Plan:
    """What the requests of a batch ask for.

    Attributes:
        touched: whether any logits are changed before sampling.
        greedy: whether every request is greedy.
        raw_logprobs: whether raw logits are read after processing.
        processed_logprobs: whether processed logits are read for more than sampling.
    """

    touched: bool
    greedy: bool
    raw_logprobs: bool
    processed_logprobs: bool


def attach(sampler: "Sampler", max_num_reqs: int) -> None:
    """Attach the plans to a sampler that is being constructed."""
    # A class that is derived from it may change what is only read here.
    on = features.SAMPLER_COPIES in switch.enabled() and type(sampler).__bases__ == (object,)
    setattr(sampler, subclasses.ATTRIBUTE, SamplerCopies(sampler, max_num_reqs, on))


def of(sampler: "Sampler") -> "SamplerCopies":
    """Return a sampler's plans; off if its class attached none."""
    return subclasses.attached(sampler, lambda: SamplerCopies(sampler, 0, on=False))


class SamplerCopies:
    """The plans of one sampler."""

    def __init__(self, sampler: "Sampler", max_num_reqs: int, on: bool) -> None:
        self.sampler = sampler
        self.on = on
        self._added = np.zeros(max_num_reqs, dtype=bool)
        # The batch at hand: its requests' places, as bytes, and its plan.
        self._batch: bytes | None = None
        self._plan: Plan | None = None

    def add_request(self, req_idx: int) -> None:
        """A request has been given a place; what it asks for has been taken in."""
        if self.on:
            self._added[req_idx] = True
            self._batch = None

    def decide(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> Handling:
        """What is to become of a batch's logits.

        Args:
            logits: [positions, vocab].
            idx_mapping_np: [requests] int32 their places.
        """
        plan = self._planned(idx_mapping_np)
        if plan is None:
            self._warm_up(logits, idx_mapping_np)
            return Handling.COPY
        as_copied = _as_copied(logits)
        if plan.touched:
            in_place = as_copied and not plan.raw_logprobs
            return Handling.IN_PLACE if in_place else Handling.COPY
        if as_copied:
            return Handling.AS_IS
        if logits.stride(-1) != 1 or plan.processed_logprobs:
            return Handling.COPY  # the order of ties and of sums may depend on the dtype
        # Where drafts are verified, sums are taken for rows that are not greedy.
        plain = plan.greedy or len(logits) == len(idx_mapping_np)
        return Handling.AS_IS if plain else Handling.COPY

    def _warm_up(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> None:
        """Compile the kernels for logits as they are, which upstream's own runs do not."""
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

    def _planned(self, idx_mapping_np: np.ndarray) -> Plan | None:
        """The batch's plan; None: a request is not known."""
        if not self.on:
            return None
        batch = idx_mapping_np.tobytes()
        if batch != self._batch:
            self._batch = batch
            known = bool(self._added[idx_mapping_np].all())
            self._plan = self._made(idx_mapping_np) if known else None
        return self._plan

    def _made(self, at: np.ndarray) -> Plan:
        sampler = self.sampler
        states = sampler.sampling_states
        temperature = states.temperature.np[at]
        touched = (
            sampler.logit_bias_state.use_logit_bias[at]
            | sampler.penalties_state.use_penalty[at]
            | (sampler.bad_words_state.num_bad_words.np[at] != 0)
            | ((temperature != 0.0) & (temperature != 1.0))
            | (states.min_p.np[at] != 0.0)
            | (states.top_k.np[at] != states.vocab_size)
            | (states.top_p.np[at] != 1.0)
        )
        asked = (
            states.max_num_logprobs(at) != NO_LOGPROBS
            or sampler.logprob_token_ids_state.max_num_token_ids(at) > 0
        )
        processed = asked and sampler.logprobs_mode == "processed_logprobs"
        return Plan(
            touched=bool(touched.any()),
            greedy=bool((temperature == 0.0).all()),
            raw_logprobs=asked and not processed,
            processed_logprobs=processed,
        )


def _as_copied(logits: torch.Tensor) -> bool:
    """Whether upstream's copy would be of the same dtype and layout."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return False
    return bool(logits.data_ptr() % 16 == 0)
