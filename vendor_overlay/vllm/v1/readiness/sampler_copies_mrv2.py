"""Model Runner V2's sampler without needless copies of the logits.

Upstream copies all logits to float32 on every step. Here a plan a batch says which rows'
logits anything that the requests ask for will change. Where it is none, the logits are
sampled from as they are: the kernels convert to float32 as they load, which is exact. Where
it is some, only those rows are copied, processed and sampled from, beside the others.

A row whose request was not added here takes upstream's path, and so does all of a batch
with it: the profile run's among them, so that its peak of memory stays upstream's.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.readiness import switch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.sampler import Sampler

#: The share of rows up to which those that need processing are taken apart; 0: never.
APART_SHARE = 0.25
#: Batches of fewer rows are not taken apart: there is too little to save.
APART_FROM = 32
#: Upstream's top-k top-p has another kernel for fewer rows than this.
_FEWEST = 8


@dataclass
class Plan:
    """What the requests of a batch ask for.

    Attributes:
        touched: [requests] bool: whose logits are changed before sampling.
        any_touched: whether there is one.
        greedy: whether every request is greedy.
        raw_logprobs: whether raw logits are read after processing.
        processed_logprobs: whether processed logits are read for more than sampling.
        apart: the rows to be taken apart, int64 on the host; None: all or none.
        apart_on_device: the same on the device, once they have been needed.
    """

    touched: np.ndarray
    any_touched: bool
    greedy: bool
    raw_logprobs: bool
    processed_logprobs: bool
    apart: np.ndarray | None
    apart_on_device: torch.Tensor | None = None


class SamplerCopies:
    """The plans of one sampler."""

    def __init__(self, sampler: "Sampler", max_num_reqs: int) -> None:
        self.sampler = sampler
        self.on = "sampler-copies" in switch.enabled()
        self._added = np.zeros(max_num_reqs, dtype=bool)
        # The batch at hand: its requests' places, and its plan.
        self._batch: np.ndarray | None = None
        self._plan: Plan | None = None
        self._processing_apart = False

    def add_request(self, req_idx: int) -> None:
        """A request has been given a place; what it asks for has been taken in."""
        self._added[req_idx] = True
        self._batch = None

    def leaves_alone(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> bool:
        """Whether logits can be sampled from as they are.

        Args:
            logits: [positions, vocab].
            idx_mapping_np: [requests] their places.
        """
        if self._processing_apart:
            return False
        plan = self._planned(idx_mapping_np)
        if plan is None:
            self._warm_up(logits, idx_mapping_np)
            return False
        if plan.any_touched or logits.stride(-1) != 1:
            return False
        if _as_copied(logits):
            return True
        if plan.processed_logprobs:
            return False  # the order of ties and of sums may depend on the dtype
        # Where drafts are verified, sums are taken for rows that are not greedy.
        return plan.greedy or len(logits) == len(idx_mapping_np)

    def may_overwrite(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> bool:
        """Whether logits may be processed in place: nobody reads them afterwards.

        Args:
            logits: [positions, vocab].
            idx_mapping_np: [requests] their places.
        """
        if self._processing_apart:
            return True
        plan = self._planned(idx_mapping_np)
        return plan is not None and _as_copied(logits) and not plan.raw_logprobs

    def sample_apart(
        self,
        logits: torch.Tensor,
        places: torch.Tensor,
        places_np: np.ndarray,
        pos: torch.Tensor,
        *more: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sample the few rows that need processing apart from those that need none.

        Noise depends on a row's seed and position alone, and every kernel keeps to its
        rows. Rows that need none are taken along where fewer than :data:`_FEWEST` do.

        Args:
            logits: [requests, vocab], one row a request.
            places: [requests] int32, theirs among all requests.
            places_np: the same on the host.
            pos: [requests] int64 positions.
            more: [requests] each, what else processing needs of the rows.

        Returns:
            [requests] token ids, and ``logits``, which nobody reads as processed; None:
            they are not to be taken apart.
        """
        plan = self._planned(places_np)
        if (
            plan is None
            or plan.apart is None
            or len(logits) != len(places_np)
            or logits.stride(-1) != 1
            or (_as_copied(logits) and not plan.raw_logprobs)
        ):
            return None
        if plan.apart_on_device is None:
            listed = plan.apart.tolist()
            plan.apart_on_device = async_tensor_h2d(listed, torch.int64, logits.device)
        rows = plan.apart_on_device
        few, places_few, pos_few, *more_few = (x[rows] for x in (logits, places, pos, *more))
        self._processing_apart = True
        try:
            processed = self.sampler.apply_sampling_params(
                few.to(torch.float32), places_few, places_np[plan.apart], pos_few, *more_few
            )
        finally:
            self._processing_apart = False
        sampled = self._sample(logits, places, pos)
        sampled.scatter_(0, rows, self._sample(processed, places_few, pos_few))
        return sampled, logits

    def _sample(
        self, logits: torch.Tensor, places: torch.Tensor, pos: torch.Tensor
    ) -> torch.Tensor:
        states = self.sampler.sampling_states
        return gumbel_sample(
            logits,
            places,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _warm_up(self, logits: torch.Tensor, idx_mapping_np: np.ndarray) -> None:
        """Compile the kernels for logits as they are, which upstream's own runs do not."""
        if not self.on or logits.stride(-1) != 1 or len(logits) != len(idx_mapping_np):
            return
        zeros = torch.zeros(2, dtype=torch.int32, device=logits.device)
        positions = zeros.to(torch.int64)
        self._sample(logits[:1], zeros[:1], positions[:1])
        drafts = self.sampler.num_speculative_tokens - 1
        if drafts > 0 and len(logits) > 1:
            states = self.sampler.sampling_states
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
        if self._batch is None or not np.array_equal(self._batch, idx_mapping_np):
            self._batch = idx_mapping_np.copy()
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
        apart = None
        if touched.any() and len(at) >= APART_FROM and not processed:
            # The touched ones first, and others behind them, each in its order.
            rows = np.argsort(~touched, kind="stable")[: max(_FEWEST, touched.sum())]
            if len(rows) <= APART_SHARE * len(at):
                apart = np.sort(rows)
        return Plan(
            touched=touched,
            any_touched=bool(touched.any()),
            greedy=bool((temperature == 0.0).all()),
            raw_logprobs=asked and not processed,
            processed_logprobs=processed,
            apart=apart,
        )


def _as_copied(logits: torch.Tensor) -> bool:
    """Whether upstream's copy would be of the same dtype and layout."""
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return False
    return bool(logits.data_ptr() % 16 == 0)
