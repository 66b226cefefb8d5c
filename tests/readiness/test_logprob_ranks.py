"""The feature logprob-ranks: the kernel, interpreted, counts what upstream's function counts."""

import importlib
from unittest import mock

import pytest
import torch
from support import modules
from vllm.v1.readiness.sample import logprob_ranks
from vllm.v1.sample.ops.logprobs import batched_count_greater_than

#: Upstream's function without inductor.
UPSTREAM = batched_count_greater_than._torchdynamo_orig_callable
SPECIAL = [float("inf"), float("-inf"), float("nan"), -0.0, 0.0]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 37), (5, 4096), (2, 9001)])
def test_kernel_counts_as_upstream(rows: int, width: int) -> None:
    """Ties, infinities and NaN count as upstream's; columns behind a row's end do not."""
    draw = torch.Generator().manual_seed(rows)
    scores = torch.randint(-9, 9, (rows, width + 3), generator=draw).float()[:, :width]
    scores[:, : len(SPECIAL)] = torch.tensor(SPECIAL)[:width]
    name = "vllm.v1.readiness.kernels.logprob_ranks"
    with modules.triton_interpreted(name):
        kernels = importlib.import_module(name)
        for value in [*SPECIAL, 3.0, float(scores[0, -1])]:
            values = torch.full((rows, 2), value)[:, :1]
            ranks = kernels.count(scores, values)
            assert ranks.dtype == torch.int64
            assert torch.equal(ranks, UPSTREAM(scores, values))


def test_other_tensors_are_upstreams() -> None:
    """Off CUDA, and with the feature off, the sampler calls upstream's function."""
    scores = torch.ones(2, 3)
    upstream = mock.Mock()
    assert logprob_ranks.count(upstream, scores, scores[:, :1]) is upstream.return_value
    upstream.assert_called_once()


def test_sampler_counts_by_the_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both of the sampler's ways to gather logprobs have the seam."""
    count = mock.Mock(side_effect=lambda _, *arguments: UPSTREAM(*arguments))
    monkeypatch.setattr(logprob_ranks, "count", count)
    sampler = modules.overlaid(modules.SAMPLER).Sampler()
    logprobs = torch.randn(2, 9).log_softmax(-1)
    sampler.gather_logprobs(logprobs, 2, torch.tensor([3, 4]))
    sampler.gather_specific_token_logprobs(logprobs, {0: [1], 1: [2, 3]}, torch.tensor([3, 4]))
    assert count.call_count == 2
