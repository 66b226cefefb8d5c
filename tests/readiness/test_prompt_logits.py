"""The fix prompt-logits: what is returned of a prompt, by logprobs_mode."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import modules
from support.batches import Spec, empty, fill
from support.sampling import MODES, same
from vllm.v1.readiness.engine import switch

VOCABULARY = 41
PROMPT = [1, 5, 7, 3, 9, 9, 2]
WIDTH = 4
#: The steps in which the prompt is computed, in tokens.
CHUNKS = (2, 1, 4)


def of_prompt(name: str, mode: str, logits: torch.Tensor) -> Any:
    """Compute a prompt's logprobs by upstream's runner, ours with the fix off, or ours."""
    load = modules.pristine if name == "pinned" else modules.overlaid
    value = "-prompt-logits" if name == "off" else "on"
    with mock.patch.dict(os.environ, {switch.NAME: value}):
        batch = empty(load, VOCABULARY)
    fill(batch, [Spec(PROMPT, [], {})])
    request = SimpleNamespace(
        prompt_token_ids=PROMPT, in_progress_prompt_logprobs_cpu=None, num_computed_tokens=0
    )
    runner = object.__new__(load(modules.RUNNER).GPUModelRunner)
    vars(runner).update(
        input_batch=batch,
        requests={"r0": request},
        num_prompt_logprobs={"r0": WIDTH},
        device=torch.device("cpu"),
        use_async_scheduling=False,
        query_start_loc=SimpleNamespace(np=np.array([0, 0])),
        sampler=load(modules.SAMPLER).Sampler(mode),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden),
        _sync_device=lambda: None,
    )
    done: dict[str, Any] = {}
    for chunk in CHUNKS:
        start = request.num_computed_tokens
        with torch.compiler.set_stance("force_eager"):  # else it compiles every shape
            done = runner._get_prompt_logprobs_dict(logits[start : start + chunk], {"r0": chunk})
        request.num_computed_tokens += chunk
    return done["r0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["pinned", "off", "ours"])
def test_a_prompt_gets_what_the_mode_says(name: str, mode: str, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(3)
    logits = (torch.randn((len(PROMPT), VOCABULARY), generator=chance) * 6).to(dtype)
    before = logits.clone()
    ids, values, ranks, _ = of_prompt(name, mode, logits)
    computed = before.log_softmax(-1, dtype=torch.float32)
    if name == "ours" and mode.endswith("logits"):
        computed = before.float()
    assert torch.equal(logits, before)
    assert ids[:, 0].tolist() == PROMPT[1:]
    assert ids.shape == (len(PROMPT) - 1, 1 + WIDTH)
    same(values, computed[:-1].gather(1, ids.long()))
    stock = of_prompt("pinned", "raw_logprobs", before)
    assert torch.equal(ids, stock[0])
    assert torch.equal(ranks, stock[2])
