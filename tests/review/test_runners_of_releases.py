"""The model runners that real releases take, compared with their own code, which is run."""

import ast
import copy
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from review import runners
from review.references import References
from review.runners import SELECTOR
from review.selecting import KINDS, MODEL, OF_ONE, OTHER, UNCLEAR
from support import releases

pytestmark = pytest.mark.slow

OWNER, NAME = SELECTOR[1].split(".")
#: Releases whose choices are of different forms, and those that were once misread.
VERSIONS = ("0.22.1", "0.23.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.33.0")
#: Architectures, and whether models of them are hybrid in each release that has them.
ARCHITECTURES = {
    "LlamaForCausalLM": False,
    "Qwen3ForCausalLM": False,
    "Qwen3MoeForCausalLM": False,
    "Qwen2MoeForCausalLM": False,
    "Qwen3_5ForConditionalGeneration": True,
    "Zamba2ForCausalLM": True,
}


class Defaults:
    """Options that nobody has set: each compares as 0 and is false; and parts with such."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of any option."""
        return Defaults() if name.endswith("_config") else 0


class Server:
    """A configuration that has only a model, and parts in which nothing is set."""

    def __getattr__(self, name: str) -> Any:
        """Return a part; None for one that is made on demand."""
        assert name != NAME, "the property has failed"
        made = ("parallel_config", "compilation_config", "cache_config", "attention_config")
        return Defaults() if name in made else None


class Model(Defaults):
    """A model's configuration: what is given, and else defaults."""

    def __init__(self, architecture: str, facts: dict[str, object]) -> None:
        """Make one that answers with these facts."""
        self.architectures = [architecture]
        self.__dict__.update(facts)


@cache
def server_class(version: str) -> type[Server]:
    """The release's own configuration, cut down to the methods that choose the runner."""
    module = code(version).definitions.module(SELECTOR[0])
    assert module is not None
    tree = copy.deepcopy(module.tree)
    named = "v2_model_runner"
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.FunctionDef)) and named in ast.unparse(node).lower():
            if isinstance(node, ast.FunctionDef):
                node.decorator_list = []
            kept.append(node)
        elif isinstance(node, ast.ClassDef) and node.name == OWNER:
            node.bases, node.decorator_list = [ast.Name("Server", ast.Load())], []
            node.body = [
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef)
                and (not each.decorator_list or ast.unparse(each.decorator_list[0]) == "property")
            ]
            kept.append(node)
    tree.body = [*ast.parse("from __future__ import annotations").body, *kept]
    names: dict[str, Any] = {
        "Server": Server,
        "envs": SimpleNamespace(VLLM_USE_V2_MODEL_RUNNER=None),
        "HAS_TRITON": True,
        "logger": mock.Mock(),
        **dict.fromkeys(("current_platform", "CompilationMode", "CUDAGraphMode"), mock.Mock()),
    }
    compiled = compile(ast.fix_missing_locations(tree), SELECTOR[0], "exec", dont_inherit=True)
    exec(compiled, names)
    made: type[Server] = names[OWNER]
    return made


def chosen(version: str, model: Model) -> str:
    """What the release's own property returns for a model, on a GPU with Triton."""
    server = server_class(version)()
    setattr(server, MODEL, model)
    return "v2" if getattr(server, NAME) else "v1"


def known(facts: dict[str, object]) -> list[dict[str, object]]:
    """The facts with each that is open as true and as false."""
    made = [dict(facts)]
    for name, value in facts.items():
        if value is UNCLEAR:
            made = [{**each, name: open_} for each in made for open_ in (True, False)]
    return made


def code(version: str) -> References:
    return References.of(releases.release(version).upstream)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_choice_is_that_of_the_release_s_code(version: str) -> None:
    for kind, facts in KINDS.items():
        answers = {chosen(version, Model(OTHER, each)) for each in known(dict(facts))}
        assert {runners.serves(code(version), OTHER, kind)} == answers, kind
    for architecture, hybrid in ARCHITECTURES.items():
        for kind in OF_ONE:
            model = Model(
                architecture, {**KINDS[kind], "is_hybrid": hybrid, "has_inner_state": hybrid}
            )
            served = runners.serves(code(version), architecture, kind)
            assert served == chosen(version, model), (architecture, kind)


def test_the_choices_of_the_releases_differ() -> None:
    """The comparison would not see a reading that is always the same."""
    served = {
        (kind, runners.serves(code(version), OTHER, kind)) for version in VERSIONS for kind in KINDS
    }
    assert served == {(kind, runner) for kind in KINDS for runner in ("v1", "v2")}
