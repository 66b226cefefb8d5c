"""The decision which model runner serves: shown, and not interpreted."""

from pathlib import Path

import pytest
from review import review, runners
from review.model import Model
from review.runners import Decision
from support import worded
from support.releases import pinned
from support.series import replaced, upstream

CONFIG = "vllm/config/vllm.py"
BASE = '''\
import vllm.envs as envs
from vllm.triton import HAS_TRITON

DEFAULT_ARCHITECTURES = frozenset({"OneForCausalLM"})
OTHER = 1


class VllmConfig:
    @property
    def use_v2_model_runner(self) -> bool:
        """Decide."""
        wanted = envs.VLLM_USE_V2_MODEL_RUNNER
        if wanted is not None:
            return wanted
        if not self._is_default():
            return False
        return HAS_TRITON and not self._unsupported()

    def _is_default(self) -> bool:
        architectures = getattr(self.model_config, "architectures", [])
        if not any(arch in default_architectures() for arch in architectures):
            return False
        return not self.model_config.is_moe

    def _unsupported(self) -> list[str]:
        return ["LoRA"] if self.lora is not None else []

    def unrelated(self) -> int:
        return OTHER


def default_architectures() -> frozenset[str]:
    return DEFAULT_ARCHITECTURES
'''
ENVS = """\
VLLM_USE_V2_MODEL_RUNNER: bool | None = None
OTHER: int = 1
variables = {"VLLM_USE_V2_MODEL_RUNNER": lambda: os.getenv("VLLM_USE_V2_MODEL_RUNNER")}
"""


def model(text: str = BASE, envs: str = ENVS) -> Model:
    return Model(upstream({CONFIG: text, "vllm/envs.py": envs}))


def decided(text: str = BASE, envs: str = ENVS) -> Decision:
    decision = runners.decision(model(text, envs))
    assert decision is not None
    return decision


#: Edits of the configuration and of the environment, each of which may change the decision.
EDITS = {
    "another architecture": ('{"OneForCausalLM"}', '{"OneForCausalLM", "TwoForCausalLM"}'),
    "every architecture": ("if not self._is_default():", "if False:"),
    "a condition": ("self.lora is not None", "self.lora is None"),
    "a kind of model": ("not self.model_config.is_moe", "not self.model_config.is_new"),
    "a function within": ("return DEFAULT_ARCHITECTURES", "return frozenset()"),
    "another default": ("bool | None = None", "bool | None = True"),
    "another reading of the variable": ('RUNNER")}', 'RUNNER", "1")}'),
}


@pytest.mark.parametrize("name", EDITS)
def test_any_change_of_what_decides_is_shown(name: str) -> None:
    old, new = EDITS[name]
    texts = [replaced(t, (old, new)) if old in t else t for t in (BASE, ENVS)]
    found = runners.compare(model(), model(*texts))
    assert found.changed
    assert any(line.startswith("+") for line in found.diff)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Decide."""', '"""Decide\n\n        now.\n        """'),
        ("return OTHER", "return -OTHER"),
        ("OTHER = 1", "OTHER = 2"),
    ],
)
def test_nothing_else_is(old: str, new: str) -> None:
    assert not runners.compare(model(), model(replaced(BASE, (old, new)))).changed


def test_it_has_the_place_of_the_property() -> None:
    decision = decided()
    assert (decision.path, BASE.splitlines()[decision.line - 1].strip()) == (
        CONFIG,
        "def use_v2_model_runner(self) -> bool:",
    )
    for part in ("DEFAULT_ARCHITECTURES = ", "def _unsupported", "def default_architectures"):
        assert part in decision.text
    assert "unrelated" not in decision.text


def test_another_decision_is_shown(tmp_path: Path) -> None:
    overlay, base = worded.checkout(tmp_path / "checkout"), worded.upstream()
    release = worded.release("0.23.0", *worded.TAKEN_OVER)
    result = review.of_release(overlay, base, release, tmp_path / "out")
    assert result.verdict == review.CHANGED
    assert any("which model runner serves is not 0.22.0's" in each for each in result.decisions)
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")
    assert '+NAMED = frozenset({"OneForCausalLM", "TwoForCausalLM"})' in report


def test_a_decision_that_is_gone_needs_eyes() -> None:
    gone = model(replaced(BASE, ("def use_v2_model_runner", "def runner")))
    assert runners.compare(model(), gone).changed
    assert runners.decision(gone) is None


def test_a_release_without_model_runner_v1_is_told() -> None:
    base = Model(upstream({runners.RUNNER: "A = 1\n"}))
    assert runners.compare(base, Model(upstream({}))).without_v1
    assert not runners.compare(base, base).without_v1


def test_the_pinned_release_s_decision_is_found() -> None:
    decision = runners.decision(Model(pinned()))
    assert decision is not None
    assert "Qwen3ForCausalLM" in decision.text
