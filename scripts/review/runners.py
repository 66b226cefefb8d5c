"""The decision which model runner serves: its source, and the readings of it.

The decision is the property ``use_v2_model_runner`` and every method, function and constant of its
module that it uses, with the environment variable that overrides it. It is shown as a diff against
the pinned release's, and is never interpreted: its result is known only for sources that a
person has read (:data:`READINGS`).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from review.model import Model, shape, unified

PROPERTY, VARIABLE = "use_v2_model_runner", "VLLM_USE_V2_MODEL_RUNNER"
V1, V2 = "V1", "V2"
#: The file of Model Runner V1, without which most words have nothing to serve.
RUNNER = "vllm/v1/worker/gpu_model_runner.py"

_ENVS = "vllm/envs.py"
_IGNORED = ("logger",)


@dataclass(frozen=True)
class Reading:
    """Result of a decision, as a person has read its source.

    Attributes:
        text: the models that each runner serves by default, with every option at its default.
        served: example model to the runner that serves it.
    """

    text: str
    served: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The decision of one release.

    Attributes:
        path: of the file that has the property.
        line: of the property, one-based.
        text: the source of all that it uses in that file, and of the variable.
        digest: of that source without comments, docstrings and layout.
    """

    path: str
    line: int
    text: str
    digest: str

    @property
    def reading(self) -> Reading | None:
        """Reading of this source; None if it was not read."""
        return READINGS.get(self.digest)


@dataclass(frozen=True)
class Runners:
    """The decisions of two releases.

    Attributes:
        before: of the pinned release; None if it has none.
        after: of the release.
        without_v1: whether the release lacks the file of Model Runner V1.
    """

    before: Decision | None
    after: Decision | None
    without_v1: bool

    @property
    def changed(self) -> bool:
        """True if a person must decide: the source has changed, or V1 is gone."""
        return self.without_v1 or (self.before and self.before.digest) != (
            self.after and self.after.digest
        )

    @property
    def diff(self) -> list[str]:
        """A unified diff of both sources."""
        return unified(*(each.text if each else "" for each in (self.before, self.after)))

    @property
    def taken(self) -> list[str]:
        """The example models that V1 serves in the pinned release, and V2 in this one."""
        old, new = (
            (each and each.reading and each.reading.served) or {}
            for each in (self.before, self.after)
        )
        return [model for model in old if old[model] == V1 and new.get(model) == V2]


def compare(base: Model, release: Model) -> Runners:
    """Return the decisions of both releases."""
    had = RUNNER in base.paths.values()
    without = had and RUNNER not in release.paths.values()
    return Runners(decision(base), decision(release), without)


def decision(model: Model) -> Decision | None:
    """Return the decision of a release; None if no file of ``vllm/config`` has the property."""
    paths = sorted(p for p in model.paths.values() if p.startswith("vllm/config"))
    for path in paths:
        text = model.text(path)
        if f"def {PROPERTY}(" not in text:
            continue
        tree = ast.parse(text)
        owners: list[ast.Module | ast.ClassDef] = [tree]
        owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in owners:
            if first := _defined(owner).get(PROPERTY):
                used = _used(tree, owner, first)
                parts = [*(_source(text, each) for each in used), *_variable(model)]
                digest = hashlib.sha256("\n".join(map(shape, parts)).encode()).hexdigest()
                return Decision(path, first.lineno, "\n\n".join(parts), digest[:16])
    return None


def _defined(owner: ast.Module | ast.ClassDef) -> dict[str, ast.stmt]:
    """Return the functions and variables of a module or class by name."""
    found: dict[str, ast.stmt] = {}
    for node in owner.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id: node for each in targets if isinstance(each, ast.Name)}
    return found


def _used(tree: ast.Module, owner: ast.Module | ast.ClassDef, first: ast.stmt) -> list[ast.stmt]:
    """Return a statement and what it uses of its class and module, in the order of the file."""
    own, top = _defined(owner), _defined(tree)
    fields = (ast.Assign, ast.AnnAssign)
    methods = {name: node for name, node in own.items() if not isinstance(node, fields)}
    found, left = [first], [first]
    while left:
        for node in ast.walk(left.pop()):
            other: ast.stmt | None = None
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                other = methods.get(node.attr)
            elif isinstance(node, ast.Name) and node.id not in _IGNORED:
                other = top.get(node.id)
            if other is not None and other not in found:
                found.append(other)
                left.append(other)
    return sorted(found, key=lambda node: node.lineno)


def _source(text: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(each.lineno for each in decorators)])
    return "\n".join(text.split("\n")[first - 1 : node.end_lineno])


def _variable(model: Model) -> Iterator[str]:
    """Yield the declaration and the value of the variable that overrides the decision."""
    if _ENVS not in model.paths.values():
        return
    text = model.text(_ENVS)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == VARIABLE:
            yield ast.unparse(node)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == VARIABLE:
                    yield f"{{{key.value!r}: {ast.unparse(value)}}}"


_EXAMPLES = ("dense Llama", "Qwen3", "Qwen3-MoE", "Bamba", "Qwen3.5")
_REST = "V1 serves every other model."
_OPTIONS = "An option that the list of unsupported features names brings V1 back."
_MOST = (
    "V2 serves generating models, quantized ones included, that are neither mixture-of-experts, "
    "hybrid nor attention-free, and {}. " + _REST + " " + _OPTIONS
)
_LISTED = "these mixture-of-experts models: "
_EITHER = "these mixture-of-experts or hybrid models: "
_INKLING = "the two Inkling, LongcatFlashNgram"
_SEVEN = f"DeepseekV2, Qwen2Moe, GraniteMoe, {_INKLING}"
_EVERY = f"V2 serves every model. {_OPTIONS}"


def _reading(text: str, runners: str) -> Reading:
    """Return a reading with the runner of each example, as digits."""
    return Reading(text, {m: f"V{n}" for m, n in zip(_EXAMPLES, runners, strict=True)})


#: Digest of a decision to how it was read, by hand, in the release's source, on CUDA with Triton.
#: tests/review/test_runners_of_releases.py runs the releases' own code with the example models.
READINGS: Mapping[str, Reading] = MappingProxyType(
    {
        # 0.22.0, 0.22.1
        "387b6c283b106b1a": _reading(
            f"V2 serves Qwen3ForCausalLM without quantization. {_REST} {_OPTIONS}", "12111"
        ),
        # 0.23.0
        "7ebc6f2e8c6ee142": _reading(
            "V2 serves LlamaForCausalLM, MistralForCausalLM and Qwen3ForCausalLM without "
            f"quantization. {_REST} {_OPTIONS}",
            "22111",
        ),
        # 0.24.0
        "237c84cde27095b5": _reading(
            "V2 serves Llama, Mistral, Qwen3, DeepseekV2, Qwen2Moe and GraniteMoe (ForCausalLM), "
            f"quantized or not. {_REST} {_OPTIONS}",
            "22111",
        ),
        # 0.25.0, 0.25.1
        "678ba29214520ea0": _reading(
            _MOST.format(f"{_LISTED}DeepseekV2, Qwen2Moe and GraniteMoe"), "22111"
        ),
        # 0.26.0
        "15b148d2b293427b": _reading(_MOST.format(f"{_LISTED}{_SEVEN}"), "22111"),
        # 0.27.1
        "d029db80eb7dc603": _reading(
            _MOST.format(f"{_EITHER}{_SEVEN} and, but on ROCm, KimiK3"), "22111"
        ),
        # 0.28.0
        "5753dadf09dc1e1a": _reading(
            _MOST.format(f"{_EITHER}{_SEVEN}, KimiK3 and, but on ROCm, DeepseekV4"), "22111"
        ),
        **dict.fromkeys(
            (
                "c52def10cf949c30",  # 0.29.0, but for some architectures on ROCm
                "383c526db329d8ab",  # 0.30.0
                "72407a01283b52bc",  # 0.31.0
                "7ad87e752cb4c85a",  # 0.32.0
                "7e01569f1cb6dfc8",  # 0.33.0
            ),
            _reading(_EVERY, "22222"),
        ),
    }
)
