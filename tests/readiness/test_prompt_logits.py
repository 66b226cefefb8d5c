"""The fix prompt-logits: what is returned of a prompt, by logprobs_mode."""

from typing import Any

import pytest
import support.logprobs
import torch
from support import modules
from support.sampling import MODES, same

FIX = "prompt-logits"
VOCABULARY = 41
PROMPT = [1, 5, 7, 3, 9, 9, 2]
WIDTH = 4
#: The positions that each step computes.
RUNS = [(0, 2), (2, 3), (3, 7)]


def of_prompt(side: str, mode: str, logits: torch.Tensor) -> Any:
    """Compute a prompt's logprobs by a side's runner."""
    load = modules.of_side(side)
    return support.logprobs.of_prompt(load, PROMPT, RUNS, WIDTH, logits, mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_gets_what_the_mode_says(side: str, mode: str, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(3)
    logits = (torch.randn((len(PROMPT), VOCABULARY), generator=chance) * 6).to(dtype)
    before = logits.clone()
    ids, values, ranks, _ = of_prompt(side, mode, logits)
    computed = before.log_softmax(-1, dtype=torch.float32)
    if side == "ours" and mode.endswith("logits"):
        computed = before.float()
    assert torch.equal(logits, before)
    assert ids[:, 0].tolist() == PROMPT[1:]
    assert ids.shape == (len(PROMPT) - 1, 1 + WIDTH)
    same(values, computed[:-1].gather(1, ids.long()))
    stock = of_prompt("pinned", "raw_logprobs", before)
    assert torch.equal(ids, stock[0])
    assert torch.equal(ranks, stock[2])
