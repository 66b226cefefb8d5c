"""Recovered tokens of a request that may have no token at all, by each side's real kernel."""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from vllm.v1.readiness.engine import switch

from support import modules
from support.sampling import Case, run, under_test

#: What each side sets VLLM_READINESS to; None for the release.
SIDES = {"pinned": None, "off": "-recovered-tokens", "ours": "on"}
#: Every token that it may have is one of its stop tokens, which min_tokens forbids.
HOSTILE: dict[str, Any] = {
    "temperature": 1.0,
    "allowed_token_ids": [3, 8],
    "stop_token_ids": [3, 8],
    "min_tokens": 8,
}
HONEST: dict[str, Any] = {"temperature": 1.0, "seed": 5}
DRAFT = 7

Load = Callable[[str], Any]


@contextmanager
def side(name: str, interpreted: bool) -> Iterator[Load]:
    """A loader of this side's modules, whose kernels run on a GPU or in the interpreter."""
    value, path = SIDES[name], modules.REJECTION_SAMPLER
    parts = ["vllm.v1.readiness.sample.recovered_tokens"]
    with ExitStack() as stack:
        if interpreted:
            parts.append("vllm.v1.sample.rejection_sampler")
            stack.enter_context(modules.triton_interpreted(*parts))
            stack.enter_context(mock.patch.object(_reduction(), "apply_impl", _as_a_device))
        else:
            stack.enter_context(modules.imported_anew(*parts))
        stack.enter_context(mock.patch.dict(os.environ, {switch.NAME: value or "on"}))
        if value is None:
            rejection = importlib.import_module("vllm.v1.sample.rejection_sampler")
        else:
            rejection = modules.overlaid.__wrapped__(path)
        others = modules.pristine if value is None else modules.overlaid
        yield lambda asked: rejection if asked == path else others(asked)


def sampled(load: Load, vocabulary: int, seed: int, device: str) -> list[int]:
    """Sample for a hostile request between honest ones, each with a draft, which is rejected.

    Returns:
        The tokens in the places of the drafts.
    """
    requests = [HONEST, HOSTILE, HONEST]
    logits = torch.randn(
        (2 * len(requests), vocabulary), generator=torch.Generator().manual_seed(seed)
    )
    logits[:, DRAFT] = -9.0
    rejection = load(modules.REJECTION_SAMPLER)
    kernel = rejection.sample_recovered_tokens_kernel
    case = Case(requests, logits.to(device), drafts=[[DRAFT] for _ in requests])
    one = under_test(load, case)
    rejection.sample_recovered_tokens_kernel = kernel  # not the CPU's
    run(one)
    assert one.error is None
    tokens: list[int] = one.result.sampled_token_ids[:, 0].tolist()
    return tokens


def tokens_of(
    interpreted: bool, vocabularies: Sequence[int], device: str
) -> dict[str, dict[int, list[int]]]:
    """Sample on each side with each size of the vocabulary, as :func:`sampled` does."""
    tokens = {}
    for name in SIDES:
        with side(name, interpreted) as load:
            tokens[name] = {size: sampled(load, size, size, device) for size in vocabularies}
    return tokens


def _reduction() -> Any:
    return importlib.import_module("triton.runtime.interpreter").ReduceOps


def _as_a_device(self: Any, inputs: Any) -> Any:
    """Reduce a block pair by pair by Triton's own rule, as a device does.

    The interpreter's short cut through numpy treats NaN as the largest number.
    """

    def cut(part: slice | int) -> list[Any]:
        return [self.to_tensor(each.handle.data[part], each.dtype) for each in inputs]

    while (length := len(inputs[0].handle.data)) > 1:
        half = length // 2
        inputs = self.combine_fn.fn(*cut(slice(half)), *cut(slice(half, length)))
    return tuple(cut(0))
