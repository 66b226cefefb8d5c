"""V1 samplers without needless passes over the logits.

A plan is computed when the batch changes. It records whether any request's parameters may change
the logits before argmax, and whether any temperature scales them. Based on the plan and the
metadata, the samplers omit

- the conversion to float32 if only argmax and raw logprobs read the logits. The conversion is exact
  and preserves the first maximum. CPUs still convert, because their argmax is faster in float32;
- the second conversion if logprobs and logits processing both need one;
- copies of the raw logits, if no logprobs are requested or nothing changes the logits;
- the division by temperatures that are all 1;
- logprobs that were not requested.

The dtype of the logits that softmax, log_softmax and topk read is unchanged, and random numbers are
drawn as in upstream. Metadata without a matching plan falls back to upstream.
"""

# mirrors: vllm.v1.sample.sampler:Sampler.forward
# mirrors: vllm.v1.sample.sampler:Sampler.sample
# mirrors: vllm.v1.sample.sampler:Sampler.greedy_sample
# mirrors: vllm.v1.sample.sampler:Sampler.apply_temperature
# mirrors: vllm.v1.sample.sampler:Sampler.compute_logprobs
# mirrors: vllm.v1.sample.sampler:Sampler.gather_logprobs
# mirrors: vllm.v1.sample.sampler:Sampler.apply_logits_processors
# mirrors: vllm.v1.sample.rejection_sampler:RejectionSampler.forward
# mirrors: vllm.v1.sample.rejection_sampler:apply_sampling_constraints
# mirrors: vllm.v1.sample.rejection_sampler:rejection_sample
# mirrors: vllm.v1.sample.rejection_sampler:rejection_greedy_sample_kernel
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_native
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p
# mirrors: vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor
# mirrors: vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.readiness.engine import subclasses
from vllm.v1.readiness.sample import closed_grammars
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

#: Device types that convert to float32 before argmax: on CPUs only float32 argmax is vectorised.
_CONVERTING = frozenset({"cpu"})


@dataclass(slots=True)
class Plan(subclasses.Uncopied):
    """How a batch's requests affect the logits; valid until the batch changes."""

    changes_logits: bool  # by anything but temperature, min_p, top_k and top_p
    scales_logits: bool  # a temperature is neither 0 (greedy) nor 1
    converts_for_argmax: bool  # even if only argmax reads the logits
    #: These two identify the plan's metadata.
    temperature: torch.Tensor | None = field(compare=False)
    logitsprocs: "LogitsProcessors" = field(compare=False)


def plan(batch: "InputBatch", metadata: "SamplingMetadata") -> Plan:
    """Compute the plan of a batch whose ``metadata`` is new."""
    holder = metadata.thinking_budget_state_holder
    changes_logits = (
        not metadata.no_penalties
        or metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or any(map(_may_change_logits, metadata.logitsprocs.non_argmax_invariant))
        or (holder is not None and holder.has_tracked_requests())
    )
    scales_logits = False
    if not metadata.all_greedy:
        temperature = batch.temperature_cpu[: batch.num_reqs]
        scales_logits = bool(((temperature != 0.0) & (temperature != 1.0)).any())
    return Plan(
        changes_logits,
        scales_logits,
        converts_for_argmax=batch.device.type in _CONVERTING,
        temperature=metadata.temperature,
        logitsprocs=metadata.logitsprocs,
    )


def convert_once(logits: torch.Tensor, metadata: "SamplingMetadata") -> torch.Tensor:
    """Convert bfloat16 logits [rows, vocab] to float32 if logprobs or processing need float32.

    For bfloat16, log_softmax gives the same bits either way. For float16 on CUDA, its fused kernel
    sums differently, so float16 logits are left to upstream.
    """
    plan = _valid_plan(metadata)
    if plan is None or logits.dtype != torch.bfloat16:
        return logits
    if _only_greedy(plan, metadata) and not plan.converts_for_argmax:
        return logits
    return logits.to(torch.float32)


def raw_logits(logits: torch.Tensor, metadata: "SamplingMetadata") -> torch.Tensor:
    """Return raw float32 logits [rows, vocab], cloned if processing may change them."""
    plan = _valid_plan(metadata)
    if plan is not None and _only_greedy(plan, metadata) and logits.is_contiguous():
        return logits
    return logits.clone()


def only_argmax(sampler: "Sampler", metadata: "SamplingMetadata") -> bool:
    """Return whether the processed logits are read only by argmax, and need no conversion."""
    plan = _valid_plan(metadata)
    if plan is None or plan.converts_for_argmax or not _only_greedy(plan, metadata):
        return False
    return not (_logprobs_requested(metadata) and sampler.logprobs_mode.startswith("processed"))


def scales_logits(metadata: "SamplingMetadata") -> bool:
    """Return whether any temperature other than 1 scales the logits."""
    plan = _valid_plan(metadata)
    return plan is None or plan.scales_logits


def topk_topp_sampler(sampler: "Sampler", metadata: "SamplingMetadata") -> Callable[..., Any]:
    """Return the top-k top-p sampler, which skips logprobs if none are requested."""
    original: Any = sampler.topk_topp_sampler
    if (
        _valid_plan(metadata) is None
        or _logprobs_requested(metadata)
        or original.logprobs_mode.startswith("raw")
    ):
        return original  # type: ignore[no-any-return]
    function: Any = getattr(vars(original).get("forward"), "__func__", None)
    if function not in (type(original).forward_native, type(original).forward_cpu):
        return original  # type: ignore[no-any-return]
    return MethodType(function, SimpleNamespace(logprobs_mode="raw_logprobs"))


def bonus_logprobs(metadata: "SamplingMetadata") -> dict[str, Any]:
    """Return the logprobs fields to sample bonus tokens with; upstream requests all logprobs."""
    if _valid_plan(metadata) is None or metadata.max_num_logprobs is not None:
        return {"max_num_logprobs": -1}
    return {"max_num_logprobs": None, "logprob_token_ids": None}


def needs_raw_targets(metadata: "SamplingMetadata") -> bool:
    """Return whether logprobs require a copy of the raw target logits."""
    plan = _valid_plan(metadata)
    if plan is None:
        return True
    return metadata.max_num_logprobs is not None and not _only_greedy(plan, metadata)


def _valid_plan(metadata: "SamplingMetadata") -> Plan | None:
    """Return the metadata's plan; None if there is none or it belongs to other metadata."""
    plan: Plan | None = getattr(metadata, "copies", None)
    if (
        plan is None
        or metadata.temperature is not plan.temperature
        or metadata.logitsprocs is not plan.logitsprocs
    ):
        return None
    return plan


def _only_greedy(plan: Plan, metadata: "SamplingMetadata") -> bool:
    """Return whether all rows are greedy and nothing changes their logits."""
    return metadata.all_greedy and not plan.changes_logits


def _logprobs_requested(metadata: "SamplingMetadata") -> bool:
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def _may_change_logits(processor: "LogitsProcessor") -> bool:
    """Return whether a logits processor may change any logit before the batch changes."""
    if type(processor) in (MinTokensLogitsProcessor, closed_grammars.MinTokens):
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    return True
