"""Input batches with requests in them, upstream's and ours."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops.penalties import apply_all_penalties

from support import modules


class Spec(NamedTuple):
    """A request: its prompt, output and sampling parameters, with bad words as token ids."""

    prompt: list[int] | None
    output: list[int]
    params: dict[str, Any]
    embeds: torch.Tensor | None = None


def empty(
    path_loader: Any,
    vocab_size: int,
    device: str = "cpu",
    max_num_reqs: int = 16,
    length: int = 256,
    num_spec_tokens: int = 0,
    **named: Any,
) -> Any:
    """Make a batch without requests.

    Args:
        path_loader: :func:`modules.overlaid` or :func:`modules.pristine`.
        vocab_size: size of the vocabulary.
        device: where the batch is.
        max_num_reqs: number of rows.
        length: the longest sequence, in tokens.
        num_spec_tokens: the most drafts of a request.
        named: further arguments of the batch.
    """
    return path_loader(modules.INPUT_BATCH).InputBatch(
        max_num_reqs=max_num_reqs,
        max_model_len=length,
        max_num_batched_tokens=length,
        device=torch.device(device),
        pin_memory=device == "cuda",
        vocab_size=vocab_size,
        block_sizes=[16],
        kernel_block_sizes=[16],
        num_spec_tokens=num_spec_tokens,
        **named,
    )


def state(spec: Spec, req_id: str) -> Any:
    """Make the runner's state of a request."""
    params = {"temperature": 0.0, **spec.params}
    words = params.pop("bad_words", None)
    sampling = SamplingParams(**params)
    sampling._bad_words_token_ids = words
    return modules.pristine(modules.INPUT_BATCH).CachedRequestState(
        req_id=req_id,
        prompt_token_ids=spec.prompt,
        mm_features=[],
        sampling_params=sampling,
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=list(spec.output),
        prompt_embeds=spec.embeds,
    )


def pooled(prompt: list[int], req_id: str, requires_token_ids: bool) -> Any:
    """Make the runner's state of a request to a pooling model."""
    return modules.pristine(modules.INPUT_BATCH).CachedRequestState(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=None,
        generator=None,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
        pooling_params=PoolingParams(task="embed", requires_token_ids=requires_token_ids),
    )


def fill(batch: Any, specs: Sequence[Spec]) -> None:
    """Add requests r0, r1, ... and refresh the sampling metadata."""
    for number, spec in enumerate(specs):
        batch.add_request(state(spec, f"r{number}"))
    batch.refresh_metadata()


def prompts(batch: Any) -> torch.Tensor:
    """Prompts as upstream pads them: int64 [requests, longest prompt] on the device."""
    padded: torch.Tensor = batch._make_prompt_token_ids_cpu_tensor().to(batch.device)
    return padded


def stock_penalties(batch: Any, logits: torch.Tensor) -> torch.Tensor:
    """Apply upstream's penalties to the logits, in place, from any batch's lists."""
    metadata = batch.sampling_metadata
    return apply_all_penalties(
        logits,
        prompts(batch),
        metadata.presence_penalties,
        metadata.frequency_penalties,
        metadata.repetition_penalties,
        list(metadata.output_token_ids),
    )


def drawn(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw random bytes as [count] of ``dtype``, with all kinds of NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    size = count * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of 4-byte elements have the same bits."""
    bits = (tensor.contiguous().view(torch.int32) for tensor in (one, other))
    return bool(torch.equal(*bits))


def fail_third_slot(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    """Make the allocation of a feature's third slot run out of memory."""
    build, numbers = slots.build, itertools.count(1)

    def build_two(rows: list[int]) -> list[torch.Tensor]:
        if any(next(numbers) == 3 for _ in rows):
            raise torch.OutOfMemoryError
        slots: list[torch.Tensor] = build(rows)
        return slots

    monkeypatch.setattr(slots, "build", build_two)
