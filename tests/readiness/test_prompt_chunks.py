"""The fix prompt-chunks: prompt logprobs keep their bits, and few of them exist at a time."""

import itertools
import os
from typing import Any
from unittest import mock

import pytest
import torch
from support import logprobs, modules
from support.sampling import MODES
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.sample import prompt_chunks

VOCABULARY = 41
PROMPT = [token % VOCABULARY for token in range(3, 103, 2)]
WIDTH = 4
#: The steps in which the prompt is computed, in positions.
STEPS = (19, 3, 28)
#: Positions computed at a time.
ROWS = 8


def of_prompt(name: str, mode: str, logits: torch.Tensor) -> tuple[Any, list[int], list[int]]:
    """Compute a prompt's logprobs by upstream's runner, ours with the fix off, or ours.

    Returns:
        The logprobs, and the positions of each computation of logprobs and of logits.
    """
    load = modules.pristine if name == "pinned" else modules.overlaid
    value = "-prompt-chunks" if name == "off" else "on"
    if name == "pinned" and mode.endswith("logits"):  # prompt-logits is another fix
        mode = "raw_logprobs"
    sampler = load(modules.SAMPLER).Sampler(mode)
    sampler.gather_logprobs = gather = mock.Mock(wraps=sampler.gather_logprobs)
    compute_logits = mock.Mock(side_effect=lambda hidden: hidden)
    ends = [0, *itertools.accumulate(STEPS)]
    runs = itertools.pairwise(ends)
    with mock.patch.dict(os.environ, {switch.NAME: value}):
        done = logprobs.of_prompt(load, PROMPT, runs, WIDTH, logits, sampler, compute_logits)
    counts, products = (
        [len(call.args[0]) for call in each.call_args_list] for each in (gather, compute_logits)
    )
    return done, counts, products


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let chunks of a few positions exceed the bound."""
    monkeypatch.setattr(prompt_chunks, "_VALUES", (ROWS + 3) * VOCABULARY)
    monkeypatch.setattr(prompt_chunks, "_LEAST_VOCABULARY", VOCABULARY)


def drawn(dtype: torch.dtype) -> torch.Tensor:
    """Draw logits [positions, vocabulary] with ties."""
    chance = torch.Generator().manual_seed(3)
    logits = (torch.randn((len(PROMPT), VOCABULARY), generator=chance) * 6).to(dtype)
    logits[::3] = logits[::3].round()
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_chunks_have_the_bits_of_the_whole(mode: str, dtype: torch.dtype) -> None:
    logits = drawn(dtype)
    ours, counts, products = of_prompt("ours", mode, logits)
    off, whole, _ = of_prompt("off", mode, logits)
    assert counts == [8, 8, 3, 3, 8, 8, 8, 3]
    assert products == whole == [19, 3, 27]
    for one, other in zip(ours[:3], off[:3], strict=True):
        assert torch.equal(one, other)
    if mode.endswith("logprobs"):
        for one, other in zip(ours[:3], of_prompt("pinned", mode, logits)[0][:3], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(("limit", "value"), [("_VALUES", 1 << 26), ("_LEAST_VOCABULARY", 42)])
def test_upstream_computes_what_is_small(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_chunks, limit, value)
    assert of_prompt("ours", "raw_logprobs", drawn(torch.float32))[1] == [19, 3, 27]
