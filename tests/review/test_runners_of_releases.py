"""The readings of the decision which model runner serves, compared with the releases' own code."""

import ast
import sys
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from review import runners
from review.model import Model
from review.runners import PROPERTY, V1, V2
from support import releases

pytestmark = pytest.mark.slow

OWNER = "VllmConfig"
#: Releases whose decisions are of different forms, and those that were once misread.
VERSIONS = ("0.22.1", "0.23.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.33.0")
#: Facts of a generating dense model; every other option is at its default.
DENSE: dict[str, Any] = {
    "runner_type": "generate",
    "logprobs_mode": "raw_logprobs",
    **dict.fromkeys(("is_moe", "is_hybrid", "is_attention_free", "is_quantized"), False),
    **dict.fromkeys(("is_diffusion", "has_inner_state", "use_mla"), False),
    "logits_processors": None,
}
HYBRID = {"is_hybrid": True, "has_inner_state": True}
#: The example models of the readings: architecture, and what of it is not dense.
EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", {"is_moe": True}),
    "Bamba": ("BambaForCausalLM", HYBRID),
    "Qwen3.5": ("Qwen3_5ForConditionalGeneration", HYBRID),
}


class Defaults:
    """Options that nobody has set: each is 0, and parts have such; no feature is configured."""

    def __getattr__(self, name: str) -> Any:
        """Return the value of any option."""
        if name == "hisparse_config":
            return None
        return Defaults() if name.endswith("_config") else 0


class Server:
    """A configuration that has only a model, and parts in which nothing is set."""

    def __getattr__(self, name: str) -> Any:
        """Return a part; None for one that is made on demand."""
        assert name != PROPERTY, "the property has failed"
        made = ("parallel_config", "compilation_config", "cache_config", "attention_config")
        return Defaults() if name in made else None


def server_class(text: str, platform: mock.Mock) -> type[Server]:
    """Return the release's own configuration, cut down to its methods."""
    tree = ast.parse(text)
    kept: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.FunctionDef)):
            if "v2_model_runner" in ast.unparse(node).lower() or "MRV1" in ast.unparse(node):
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
        "lru_cache": lru_cache,
        "logger": mock.Mock(),
        "current_platform": platform,
        **dict.fromkeys(("CompilationMode", "CUDAGraphMode"), mock.Mock()),
    }
    exec(compile(ast.fix_missing_locations(tree), OWNER, "exec", dont_inherit=True), names)
    made: type[Server] = names[OWNER]
    return made


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reading_is_what_the_release_s_code_decides(version: str, monkeypatch: Any) -> None:
    model = Model(releases.release(version).upstream)
    decision = runners.decision(model)
    assert decision is not None
    assert decision.reading is not None
    platform = mock.Mock()
    platform.is_rocm.return_value = platform.is_unspecified.return_value = False
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    made = server_class(model.text(decision.path), platform)
    decided = {}
    for name, (architecture, facts) in EXAMPLES.items():
        server: Any
        server, config = made(), Defaults()
        config.__dict__.update(DENSE | facts, architectures=[architecture])
        server.model_config = config
        decided[name] = V2 if getattr(server, PROPERTY) else V1
    assert decision.reading.served == decided
    # Where V1 serves a model, that was once said of none.
    said = "V1 serves every other model" if V1 in decided.values() else "V2 serves every model"
    assert said in decision.reading.text


def test_the_readings_differ() -> None:
    """The comparison would not see a reading that is always the same."""
    served = {(m, by) for reading in runners.READINGS.values() for m, by in reading.served.items()}
    assert served >= {("Bamba", V1), ("Bamba", V2), ("dense Llama", V1), ("dense Llama", V2)}
