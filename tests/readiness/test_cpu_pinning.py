"""The fix cpu-pinning: a CPU without a driver forces tokens, and maps LoRA adapters.

The pinned function fails there, which is asserted as well: with the fix off ours fails, too.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import modules, thinking
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper import utils as punica
from vllm.v1.readiness.engine import pinning
from vllm.v1.sample import thinking_budget_state
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")

TORCH_UTILS = "vllm/utils/torch_utils.py"
FIX = "cpu-pinning"


@pytest.fixture
def upload(side: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have vLLM's modules use the function of one side, with its own defaults."""
    upload: Any = modules.of_side(side)(TORCH_UTILS).async_tensor_h2d
    monkeypatch.setattr(upload, "__defaults__", (True,))  # conftest.py replaces upstream's
    for module in (thinking_budget_state, punica):
        monkeypatch.setattr(module, "async_tensor_h2d", upload)
    pinning.lacking.cache_clear()
    yield
    pinning.lacking.cache_clear()


def forced_token() -> int:
    """The token that a request with a budget of 0 is given after its start marker."""
    holder = ThinkingBudgetStateHolder(thinking.config(), 4, 0, torch.device("cpu"), False)
    params = SimpleNamespace(thinking_token_budget=0)
    added: Any = [(0, params, [1, *thinking.START], [])]
    holder.sync_batch(BatchUpdate(1, removed=[], added=added, moved=[]))
    holder.update_state([[]], None)
    logits = holder.apply_to_logits(torch.zeros(1, 16), False, None)
    return int(logits.argmax())


def mapped_adapters() -> list[int]:
    """The adapters of two tokens."""
    mapping = LoRAMapping((1, 0), (1, 0), is_prefill=True)
    indices, *_ = punica.convert_mapping(mapping, [1, None], 2, 16, 0, torch.device("cpu"))
    return indices.tolist()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("upload")
@pytest.mark.parametrize(
    ("outcome", "value"), [(forced_token, thinking.END[0]), (mapped_adapters, [0, -1])]
)
def test_nothing_is_pinned_where_there_is_no_pinned_memory(
    side: str, outcome: Callable[[], Any], value: Any
) -> None:
    if side == "ours":
        assert outcome() == value
    else:
        with pytest.raises(RuntimeError):  # in words that depend on how PyTorch was built
            outcome()


def test_memory_is_pinned_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "lacking", lambda: False)
    assert pinning.may_pin(True)
    assert not pinning.may_pin(False)
