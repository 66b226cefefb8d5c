"""The fix closed-grammars on a GPU: the values of the CPU, without a wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu.waits import errors_for_waits
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.readiness.sample.closed_grammars import MinTokens
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate

pytestmark = pytest.mark.gpu

VOCABULARY = 151_936
ROWS = 8
DRAFTS = [2, 0, 3, 1, 2, 4, 0, 1]


def processor_on(device: str) -> MinTokens:
    """A processor whose every second row has a grammar, and each row a minimum."""
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=ROWS))
    processor = MinTokensLogitsProcessor(config, torch.device(device), device == "cuda")
    made = MinTokens(processor)
    added: list[Any] = []
    for row in range(ROWS):
        grammar = StructuredOutputsParams(choice=["a"]) if row % 2 else None
        params = SamplingParams(min_tokens=6, stop_token_ids=[2, 9], structured_outputs=grammar)
        added.append((row, params, [1], []))
    made.update_state(BatchUpdate(ROWS, removed=[], added=added, moved=[]))
    return made


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_the_same_values_without_a_wait(drafts: list[int] | None) -> None:
    count = ROWS if drafts is None else sum(drafts)
    generator = torch.Generator().manual_seed(5)
    logits = torch.rand(count, VOCABULARY, generator=generator)
    logits[torch.rand(count, generator=generator) < 0.6, 10:] = -torch.inf
    logits[:, :9] = -torch.inf
    logits[:, 2] = 1.0
    logits[::3, 5] = 0.5
    results = []
    for device in ("cpu", "cuda"):
        processor, given = processor_on(device), logits.to(device)
        with errors_for_waits():
            if drafts is None:
                processor.apply(given)
            else:
                processor.apply_with_spec_decode(given, drafts)
        results.append(given.cpu())
    assert torch.equal(*results)
    assert (results[0][:, 2] == 1.0).any()
