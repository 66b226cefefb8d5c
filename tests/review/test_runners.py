"""Which model runner a release takes for which models, of small releases."""

from typing import Any

import pytest
from review import runners
from review.references import References
from review.runners import OTHER
from support.series import replaced, upstream

CONFIG = "vllm/config/vllm.py"
BASE = """\
import vllm.envs as envs
from vllm.triton import HAS_TRITON

DEFAULT_ARCHITECTURES = frozenset({"OneForCausalLM"})


class VllmConfig:
    @property
    def use_v2_model_runner(self) -> bool:
        wanted = envs.VLLM_USE_V2_MODEL_RUNNER
        if wanted is not None:
            return wanted
        if not self._is_default():
            return False
        if not HAS_TRITON:
            return False
        unsupported = self._unsupported()
        if unsupported:
            return False
        return True

    def _is_default(self) -> bool:
        model = self.model_config
        if model is None:
            return False
        architectures = getattr(model, "architectures", [])
        if not any(arch in DEFAULT_ARCHITECTURES for arch in architectures):
            return False
        return not model.is_moe

    def _unsupported(self) -> list[str]:
        unsupported = []
        if self.lora is not None:
            unsupported.append("LoRA")
        return unsupported
"""
ONE, TWO = "OneForCausalLM", "TwoForCausalLM"
_TEST = "        if not any(arch in DEFAULT_ARCHITECTURES for arch in architectures):\n"
_GUARD = "        if not self._is_default():\n            return False\n"
_BOTH = ('{"OneForCausalLM"}', '{"TwoForCausalLM", "OneForCausalLM"}')


#: What reads the environment.
ENVS = """\
VLLM_USE_V2_MODEL_RUNNER: bool | None = None
variables = {"VLLM_USE_V2_MODEL_RUNNER": lambda: os.getenv("VLLM_USE_V2_MODEL_RUNNER")}
"""


def code(text: str, envs: str = ENVS) -> References:
    files = {"vllm/envs.py": envs, "vllm/triton.py": "HAS_TRITON = bool(input())\n"}
    return References(upstream({**files, CONFIG: text}))


def compared(text: str, base: str = BASE) -> dict[str, Any]:
    found = runners.examine(code(base), code(text))
    assert found is not None
    return found


#: The edits; the models that V2 serves, that V1 serves, and that are not clear.
CHOICES: dict[str, tuple[tuple[tuple[str, str], ...], list[str], list[str], list[str]]] = {
    "as it is": ((), [ONE], [OTHER], []),
    "another architecture": ((_BOTH,), [ONE, TWO], [OTHER], []),
    "all architectures": (((_GUARD, ""),), [OTHER], [], []),
    "none": (
        (("        return True\n", "        return False\n"),),
        *([], [ONE, OTHER], []),
    ),
    "all but some": (
        ((_TEST, _TEST.replace("if not any", "if any")),),
        *([OTHER], [ONE], []),
    ),
    "all but some, through a set": (
        ((_TEST, "        if DEFAULT_ARCHITECTURES.intersection(architectures):\n"),),
        *([OTHER], [ONE], []),
    ),
    "through an intersection of sets": (
        ((_TEST, "        if not set(architectures) & DEFAULT_ARCHITECTURES:\n"),),
        *([ONE], [OTHER], []),
    ),
    "through isdisjoint": (
        ((_TEST, "        if DEFAULT_ARCHITECTURES.isdisjoint(model.architectures):\n"),),
        *([ONE], [OTHER], []),
    ),
    "a literal": (
        ((_TEST, f'        if "{ONE}" not in architectures:\n'),),
        *([ONE], [OTHER], []),
    ),
    "in a loop's test of one": (
        ((_TEST, "        if architectures[0] in DEFAULT_ARCHITECTURES:\n"),),
        *([OTHER], [], []),
    ),
    "by something that the sources do not know": (
        (("        return True\n", "        return self.model_config.prefers_v2\n"),),
        *([], [OTHER], [ONE]),
    ),
    "by the platform first": (
        ((_GUARD, f"        if self.platform.is_old:\n            return False\n{_GUARD}"),),
        *([ONE], [OTHER], []),
    ),
    "by a call of itself": (
        ((_GUARD, f"        if self.use_v2_model_runner:\n            return False\n{_GUARD}"),),
        *([ONE], [OTHER], []),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_models_of_each_runner(name: str) -> None:
    edits, v2, v1, unclear = CHOICES[name]
    choice = runners.choice(code(replaced(BASE, *edits)))
    assert choice is not None
    assert (choice.v2, choice.v1, choice.unclear) == (v2, v1, unclear)


def test_the_choice_that_does_not_change_does_not_warn() -> None:
    found = compared(BASE)
    assert list(runners.warnings(found)) == []
    assert runners.dead(found) == []
    (sentence,) = runners.sentences(found, "1.0", "1.1")
    assert sentence == f"1.1 takes Model Runner V2 for {ONE} by default, as 1.0 does"


def test_more_architectures() -> None:
    found = compared(replaced(BASE, _BOTH))
    assert runners.dead(found) == [TWO]
    assert list(runners.sentences(found, "1.0", "1.1")) == [
        f"1.1 takes Model Runner V2 for {ONE} and {TWO} by default; 1.0 does for {ONE}"
    ]
    first, second = runners.warnings(found)
    assert first.startswith(f"Model Runner V2 serves {TWO} by default, where it was V1; ")
    assert "VLLM_USE_V2_MODEL_RUNNER=0 brings V1 back" in first
    assert second.endswith("vllm.config.vllm.DEFAULT_ARCHITECTURES (body)")


def test_fewer_architectures_need_eyes_and_kill_nothing() -> None:
    found = compared(BASE, replaced(BASE, _BOTH))
    assert runners.dead(found) == []
    assert len(list(runners.warnings(found))) == 1


def test_every_model() -> None:
    found = compared(replaced(BASE, (_GUARD, "")))
    assert runners.dead(found) == [OTHER]
    (sentence,) = runners.sentences(found, "1.0", "1.1")
    assert sentence == f"1.1 takes Model Runner V2 for every model by default; 1.0 does for {ONE}"
    assert "Model Runner V2 serves every model by default, where" in next(runners.warnings(found))


def test_every_model_but_some() -> None:
    edits = ((_TEST, _TEST.replace("if not any", "if any")), (f'"{ONE}"', f'"{TWO}"'))
    found = compared(replaced(BASE, *edits))
    assert runners.dead(found) == [OTHER]
    assert f"every model but {TWO} by default" in next(runners.sentences(found, "1.0", "1.1"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.lora is not None", "self.lora is None"),
        ("return not model.is_moe", "return not model.is_dense"),
        ("if not HAS_TRITON:", "if HAS_TRITON:"),
    ],
)
def test_a_changed_condition_needs_eyes(old: str, new: str) -> None:
    (warning,) = runners.warnings(compared(replaced(BASE, (old, new))))
    assert warning.startswith("what the choice of the model runner depends on has changed: ")


@pytest.mark.parametrize(
    ("old", "new"), [("bool | None = None", "bool = True"), ('RUNNER")}', 'RUNNER", "1")}')]
)
def test_another_default_of_the_variable_needs_eyes(old: str, new: str) -> None:
    found = runners.examine(code(BASE), code(BASE, replaced(ENVS, (old, new))))
    (warning,) = runners.warnings(found)
    assert "has changed: vllm.envs.VLLM_USE_V2_MODEL_RUNNER" in warning


def test_a_choice_that_is_gone_or_unclear_needs_eyes() -> None:
    gone = compared(replaced(BASE, ("def use_v2_model_runner", "def runner")))
    unclear = compared(replaced(BASE, ("return True", "return self.prefers_v2")))
    assert "is gone" in next(runners.warnings(gone))
    assert "cannot be told from the sources" in next(runners.warnings(unclear))
    assert "is gone" in next(runners.sentences(gone, "1.0", "1.1"))
    assert "cannot be told" in next(runners.sentences(unclear, "1.0", "1.1"))


def test_a_base_with_one_runner_has_no_choice() -> None:
    assert runners.examine(code("LIMIT = 1\n"), code(BASE)) is None
    assert list(runners.sentences(None, "1.0", "1.1")) == list(runners.warnings(None)) == []
