"""The V1 samplers without needless passes over the logits.

A plan, made when the batch changes, says whether anything that the requests ask for may
change the logits before the greedy choice, and whether any temperature divides them. From
the plan and from what the metadata itself says, the samplers leave out

- the conversion to float32 where only the greedy choice and raw logprobs read the logits:
  the conversion is exact, so the first of the largest is the same either way (not on CPUs,
  where it is found faster in float32);
- the second conversion where logprobs and processing both need one;
- copies that keep raw logits where nobody asked for logprobs, or nothing changes them;
- the division by temperatures that are all 1;
- logprobs that nobody asked for.

What softmax, log_softmax and topk read keeps its dtype, and random numbers are drawn as
before. Metadata without a plan that speaks of it takes upstream's path.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

#: Types of devices on which converting and then searching float32 is faster than searching
#: fewer bits: PyTorch's argmax on CPUs has vector code for float32 alone.
_CONVERTING = frozenset({"cpu"})


@dataclass(frozen=True)
class Plan:
    """What the requests of a batch ask for, true until the batch changes.

    Attributes:
        touches: whether anything but temperature, min_p, top_k and top_p may change the
            logits.
        scales: whether a temperature is neither 0, which is greedy, nor 1.
        converts: whether logits are converted for the greedy choice all the same.
        temperature: the metadata's that the plan speaks of; not compared, nor the next.
        logitsprocs: the metadata's that the plan speaks of.
    """

    touches: bool
    scales: bool
    converts: bool
    temperature: torch.Tensor | None = field(compare=False)
    logitsprocs: "LogitsProcessors" = field(compare=False)


def plan(batch: "InputBatch", metadata: "SamplingMetadata") -> Plan:
    """The plan of a batch; what a request asks for counts, whether or not it is over.

    Args:
        batch: the batch.
        metadata: just made from it.
    """
    holder = metadata.thinking_budget_state_holder
    touches = (
        not metadata.no_penalties
        or metadata.allowed_token_ids_mask is not None
        or bool(metadata.bad_words_token_ids)
        or any(map(_may_touch, metadata.logitsprocs.non_argmax_invariant))
        or (holder is not None and holder.has_tracked_requests())
    )
    temperature = batch.temperature_cpu[: batch.num_reqs]
    scales = bool(np.any((temperature != 0.0) & (temperature != 1.0)))
    converts = batch.device.type in _CONVERTING
    return Plan(touches, scales, converts, metadata.temperature, metadata.logitsprocs)


def shared(logits: torch.Tensor, metadata: "SamplingMetadata") -> torch.Tensor:
    """The logits as logprobs and processing can both read them.

    bfloat16 only: there log_softmax makes a float32 copy of its own, from the same bits.
    For float16 it has a kernel on CUDA whose sums differ.

    Args:
        logits: [rows, vocab].
        metadata: of the rows.

    Returns:
        ``logits``, in float32 where that will be needed anyway.
    """
    ours = _plan(metadata)
    if ours is None or logits.dtype != torch.bfloat16:
        return logits
    if _greedy_alone(ours, metadata) and not ours.converts:
        return logits
    return logits.to(torch.float32)


def kept(logits: torch.Tensor, metadata: "SamplingMetadata") -> torch.Tensor:
    """Float32 logits as they are now, for the sampler's output.

    Args:
        logits: [rows, vocab] float32.
        metadata: of the rows.

    Returns:
        A copy, or ``logits`` where nothing will change them.
    """
    ours = _plan(metadata)
    if ours is not None and _greedy_alone(ours, metadata) and logits.is_contiguous():
        return logits
    return logits.clone()


def only_argmax(sampler: "Sampler", metadata: "SamplingMetadata") -> bool:
    """Whether nothing but argmax will read the processed logits, and it may do so as they are.

    Args:
        sampler: which may have to return processed logits or their logprobs.
        metadata: of the logits.
    """
    ours = _plan(metadata)
    if ours is None or ours.converts or not _greedy_alone(ours, metadata):
        return False
    return not (_asked(metadata) and sampler.logprobs_mode.startswith("processed"))


def scales(metadata: "SamplingMetadata") -> bool:
    """Whether temperatures change any logit; division by 1 changes none."""
    ours = _plan(metadata)
    return ours is None or ours.scales


def drawing(sampler: "Sampler", metadata: "SamplingMetadata") -> Callable[..., Any]:
    """The sampler's top-k top-p sampler, or one without logprobs where nobody asked.

    Args:
        sampler: whose it is.
        metadata: of the logits.
    """
    draws: Any = sampler.topk_topp_sampler
    if _plan(metadata) is None or _asked(metadata) or draws.logprobs_mode.startswith("raw"):
        return draws  # type: ignore[no-any-return]
    function: Any = getattr(vars(draws).get("forward"), "__func__", None)
    if function not in (type(draws).forward_native, type(draws).forward_cpu):
        return draws  # type: ignore[no-any-return]
    return MethodType(function, _WithoutLogprobs())


def bonus_logprobs(metadata: "SamplingMetadata") -> dict[str, Any]:
    """What the rejection sampler replaces in the metadata for its bonus tokens.

    It wants the logits of every bonus token, for which it asks for all logprobs; but only
    where somebody asked for logprobs will it look at them.
    """
    if _plan(metadata) is None or metadata.max_num_logprobs is not None:
        return {"max_num_logprobs": -1}
    return {"max_num_logprobs": None, "logprob_token_ids": None}


def keeps_targets(metadata: "SamplingMetadata") -> bool:
    """Whether raw target logits must be kept from processing, for logprobs."""
    ours = _plan(metadata)
    if ours is None:
        return True
    return metadata.max_num_logprobs is not None and not _greedy_alone(ours, metadata)


class _WithoutLogprobs:
    """What upstream's top-k top-p sampling reads of its object: that nobody reads logprobs."""

    logprobs_mode = "raw_logprobs"


def _plan(metadata: "SamplingMetadata") -> Plan | None:
    """The metadata's plan, if it speaks of it."""
    ours: Plan | None = getattr(metadata, "copies", None)
    if (
        ours is None
        or metadata.temperature is not ours.temperature
        or metadata.logitsprocs is not ours.logitsprocs
    ):
        return None
    return ours


def _greedy_alone(ours: Plan, metadata: "SamplingMetadata") -> bool:
    """Whether every row is greedy, and nothing changes its logits."""
    return metadata.all_greedy and not ours.touches


def _asked(metadata: "SamplingMetadata") -> bool:
    """Whether anybody asked for logprobs of any kind."""
    return metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids)


def _may_touch(processor: "LogitsProcessor") -> bool:
    """Whether a processor may change logits before the batch changes."""
    if type(processor) is MinTokensLogitsProcessor:
        return bool(processor.min_toks)
    if type(processor) is LogitBiasLogitsProcessor:
        return bool(processor.biases)
    return True
