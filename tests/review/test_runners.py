"""The decision which model runner serves: shown, and not interpreted."""

import pytest
from review import runners
from review.model import Model
from support.releases import pinned
from support.series import replaced, upstream

CONFIG = "vllm/config/vllm.py"
BASE = '''\
from vllm.triton import HAS_TRITON

DEFAULT_ARCHITECTURES = frozenset({"OneForCausalLM"})
OTHER = 1


class VllmConfig:
    @property
    def use_v2_model_runner(self) -> bool:
        """Decide."""
        if not self._is_default():
            return False
        return HAS_TRITON and not self._unsupported()

    def _is_default(self) -> bool:
        return self.model_config.architecture in default_architectures()

    def _unsupported(self) -> list[str]:
        return ["LoRA"] if self.lora is not None else []

    def unrelated(self) -> int:
        return OTHER


def default_architectures() -> frozenset[str]:
    return DEFAULT_ARCHITECTURES
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('{"OneForCausalLM"}', '{"OneForCausalLM", "TwoForCausalLM"}', False),
        ("if not self._is_default():", "if False:", False),
        ("self.lora is not None", "self.lora is None", False),
        ("return DEFAULT_ARCHITECTURES", "return frozenset()", False),
        ("    @property\n", "", False),
        ("def use_v2_model_runner", "def runner", False),
        ("return OTHER", "return -OTHER", True),
        ("OTHER = 1", "OTHER = 2", True),
    ],
)
def test_the_decision_is_all_that_the_property_uses(old: str, new: str, same: bool) -> None:
    before, after = (
        runners.decision(Model(upstream({CONFIG: text})))
        for text in (BASE, replaced(BASE, (old, new)))
    )
    line = BASE.splitlines().index("    def use_v2_model_runner(self) -> bool:") + 1
    assert before[0] == f"{CONFIG}:{line}"
    assert (before == after) is same


def test_the_pinned_release_s_decision_is_found() -> None:
    assert "Qwen3ForCausalLM" in "".join(runners.decision(Model(pinned()))[1])
