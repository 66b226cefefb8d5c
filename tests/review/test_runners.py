"""Which model runner a release takes for which models, of small releases."""

from collections.abc import Mapping
from typing import Any

import pytest
from review import runners
from review.references import References
from review.selecting import DENSE, EXPERTS, FREE, HYBRID, KINDS, OTHER, POOLING, QUANTIZED
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
ONE, TWO = "OneForCausalLM (dense)", "TwoForCausalLM (dense)"
_TEST = "        if not any(arch in DEFAULT_ARCHITECTURES for arch in architectures):\n"
_EXPERTS = "        return not model.is_moe\n"
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
    "an architecture of any kind": (
        ((_EXPERTS, "        return True\n"),),
        *(["OneForCausalLM"], [OTHER], []),
    ),
    "all architectures": (((_GUARD, ""),), [OTHER], [], []),
    "none": (
        (("        return True\n", "        return False\n"),),
        *([], [OTHER], []),
    ),
    "all but some": (
        ((_TEST, _TEST.replace("if not any", "if any")), (_EXPERTS, "        return True\n")),
        *([OTHER], ["OneForCausalLM"], []),
    ),
    "all but some, through a set": (
        (
            (_TEST, "        if DEFAULT_ARCHITECTURES.intersection(architectures):\n"),
            (_EXPERTS, "        return True\n"),
        ),
        *([OTHER], ["OneForCausalLM"], []),
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
        ((_TEST, '        if "OneForCausalLM" not in architectures:\n'),),
        *([ONE], [OTHER], []),
    ),
    "the first architecture": (
        ((_TEST, "        if architectures[0] not in DEFAULT_ARCHITECTURES:\n"),),
        *([ONE], [OTHER], []),
    ),
    "one that is compared": (
        ((_TEST, '        if model.architecture != "OneForCausalLM":\n'),),
        *([ONE], [OTHER], []),
    ),
    "a loop over architectures": (
        (
            (
                _TEST + "            return False\n",
                "        for each in architectures:\n"
                "            if each not in DEFAULT_ARCHITECTURES:\n"
                "                return False\n",
            ),
        ),
        *([ONE], [OTHER], []),
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


#: Decides by what a model is, as releases do since 0.25; the names of some are an exception.
BY_KIND = """\
from vllm.config.parallel import ParallelConfig
import vllm.envs as envs

WITH_EXPERTS = frozenset({"OneForCausalLM"})


class VllmConfig:
    model_config: ModelConfig = None
    drafts: DraftConfig | None = None
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)

    @property
    def use_v2_model_runner(self) -> bool:
        if (wanted := envs.VLLM_USE_V2_MODEL_RUNNER) is not None:
            return wanted
        if self.drafts is not None and self.drafts.model.architectures:
            return True
        if not self._is_ready():
            return False
        return not self._missing(self.model_config)

    def _is_ready(self) -> bool:
        model = self.model_config
        if model is None or model.runner_type != "generate":
            return False
        if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
            return False
        named = any(each in WITH_EXPERTS for each in model.architectures)
        return named or not model.is_moe

    def _missing(self, model) -> list[str]:
        missing = []
        if self.parallel.ranks > 1 and not model.has_latent_heads:
            missing.append("ranks")
        if model.has_inner_state:
            missing.append("states")
        return missing
"""
PARALLEL = "class ParallelConfig:\n    ranks: int = 1\n"
#: Where the release lists its models: one is of a hybrid class.
MODELS = {
    "vllm/model_executor/models/registry.py": "MODELS = {\n"
    '    "OneForCausalLM": ("one", "OneForCausalLM"),\n'
    '    "TwoForCausalLM": ("vllm.models.two", "TwoForCausalLM"),\n'
    "}\n",
    "vllm/model_executor/models/one.py": "class OneForCausalLM:\n    pass\n",
    "vllm/models/two.py": "class IsHybrid:\n    pass\n\n\n"
    "class TwoForCausalLM(IsHybrid):\n    pass\n",
}


def by_kind(*edits: tuple[str, str], models: Mapping[str, str] = MODELS) -> References:
    files = {"vllm/envs.py": ENVS, "vllm/config/parallel.py": PARALLEL, **models}
    return References(upstream({**files, CONFIG: replaced(BY_KIND, *edits)}))


def test_a_choice_by_the_kind_of_model() -> None:
    """A test of the model is not an option that nobody asked for."""
    release = by_kind()
    choice = runners.choice(release)
    assert choice is not None
    assert choice.v2 == ["dense models", "OneForCausalLM"]
    groups = ["mixture-of-experts models", "hybrid models", "attention-free models"]
    assert choice.v1 == [*groups, "pooling models"]
    assert choice.unclear == []
    served = {kind: runners.serves(release, OTHER, kind) for kind in KINDS}
    v1 = dict.fromkeys((EXPERTS, HYBRID, FREE, POOLING), "v1")
    assert served == {DENSE: "v2", QUANTIZED: "v2", **v1}
    assert runners.serves(release, "OneForCausalLM", EXPERTS) == "v2"
    # Of a named one the class says whether it is hybrid.
    assert runners.serves(release, "TwoForCausalLM", DENSE) == "v1"
    assert runners.serves(release, "ThreeForCausalLM", DENSE) == "unclear"


def test_a_choice_by_the_kind_of_model_is_said() -> None:
    found = runners.examine(code(BASE), by_kind())
    (sentence,) = runners.sentences(found, "1.0", "1.1")
    taken = "dense models and OneForCausalLM (mixture-of-experts)"
    assert sentence == (
        "1.1 takes Model Runner V2 for dense models and OneForCausalLM by default; "
        f"1.0 does for {ONE}"
    )
    assert f"serves {taken} by default, where" in next(runners.warnings(found))
    assert runners.dead(found) == ["dense models", "OneForCausalLM (mixture-of-experts)"]


def test_the_models_of_a_kind_but_some() -> None:
    edit = ("named or not model.is_moe", "not named and not model.is_moe")
    found = runners.examine(code(BASE), by_kind(edit))
    (sentence,) = runners.sentences(found, "1.0", "1.1")
    assert "for dense models but OneForCausalLM by default" in sentence


def test_quantized_models_are_named_where_they_differ() -> None:
    choice = runners.choice(
        code(replaced(BASE, (_EXPERTS, "        return not model.is_quantized\n")))
    )
    assert choice is not None
    assert choice.v2 == ["OneForCausalLM (dense, unquantized or mixture-of-experts)"]


_RETURNED = "        return named or not model.is_moe\n"
#: A condition on the model that cannot be followed, in the function that asks about its kind.
LOST = {
    "a fact that is new": "        return named or not model.is_new\n",
    "a test of it": "        if model.is_new:\n            return False\n        return True\n",
    "a call with the model": "        return not is_new(model)\n",
    "a call of the model": "        return not model.is_new()\n",
    "what the model holds": "        return not model.hf_config.is_new\n",
    "a conversion": "        return len(model.architectures) < 2\n",
    "a chain": "        return 0 < model.experts < 8\n",
    "a choice of two": "        return False if model.is_new else not named\n",
    "an assignment of two": "        new, _ = model.is_new, 1\n        return not new\n",
    "an assignment under a test": "        new = True\n        if model.is_new:\n"
    "            new = False\n        return new\n",
    "an assignment under two": "        new = True\n        if model is not None:\n"
    "            if model.is_new:\n                new = False\n        return new\n",
    "a function within": "        def new():\n            return model.is_new\n\n"
    "        return not new()\n",
    "a loop": "        for part in model.parts:\n            if part.is_new:\n"
    "                return False\n        return True\n",
    "a list that a loop fills": "        new = []\n        for part in model.parts:\n"
    "            new.append(part)\n        return not new\n",
    "a while": "        while model.parts:\n            return False\n        return True\n",
    "a match": "        match model.is_new:\n            case True:\n"
    "                return False\n        return True\n",
    "an error": "        if model.is_new:\n            raise ValueError\n        return True\n",
    "a with": "        with model.opened() as new:\n            return not new\n",
    "a sum": "        new = []\n        new += model.parts\n        return not new\n",
    "a model of another name": "        return ONLY.isdisjoint(self.llm.architectures)\n",
}


@pytest.mark.parametrize("name", LOST)
def test_a_condition_on_the_model_that_cannot_be_followed_is_not_known(name: str) -> None:
    release = by_kind((_RETURNED, LOST[name]))
    assert runners.serves(release, OTHER, DENSE) == "unclear"
    assert runners.serves(release, OTHER, HYBRID) == "v1"
    found = runners.examine(code(BASE), release)
    unclear, *_ = runners.sentences(found, "1.0", "1.1")
    assert unclear.startswith("which model runner 1.1 takes for dense models")
    assert "cannot be told from its sources" in unclear
    assert "every model" not in "".join(runners.sentences(found, "1.0", "1.1"))


def test_a_test_of_the_model_that_does_not_matter_is_followed_both_ways() -> None:
    release = by_kind(
        (_RETURNED, f"        if model.is_new:\n            note(model)\n{_RETURNED}")
    )
    assert runners.serves(release, OTHER, DENSE) == "v2"
    assert runners.serves(release, OTHER, EXPERTS) == "v1"


def test_a_call_passes_the_model_on_by_the_name_of_its_parameter() -> None:
    release = by_kind(
        (_RETURNED, "        return not self._missing(model=model)\n"),
        ("return not self._missing(self.model_config)", "return True"),
        ("has_inner_state", "is_quantized"),
    )
    assert runners.serves(release, OTHER, DENSE) == "v2"
    assert runners.serves(release, OTHER, QUANTIZED) == "v1"


def test_what_a_list_gains_counts() -> None:
    edit = ("        return missing\n", '        missing += ["all"]\n        return missing\n')
    for release in (by_kind(edit), by_kind(("has_inner_state", "is_quantized"))):
        assert runners.serves(release, OTHER, QUANTIZED) == "v1"


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
    edits = (
        (_TEST, _TEST.replace("if not any", "if any")),
        ('"OneForCausalLM"', '"TwoForCausalLM"'),
        (_EXPERTS, "        return True\n"),
    )
    found = compared(replaced(BASE, *edits))
    assert runners.dead(found) == [OTHER]
    assert "every model but TwoForCausalLM by default" in next(
        runners.sentences(found, "1.0", "1.1")
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.lora is not None", "self.lora is None"),
        ("return not model.is_moe", "return not (model.is_moe)  or model.is_moe and False"),
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
