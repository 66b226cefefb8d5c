"""Models and arguments of vLLM for an engine of :mod:`bench.loops.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo import model

from bench.loops.rows import ENGINES, MARKERS
from bench.models import memory

#: The eager backend has production's graphs without the minutes that inductor takes. Dynamo of
#: torch 2.11 does not trace the kernels of gated norms, which inductor does not use either.
_NORMS = ("-mixer2_gated_rms_norm", "-rms_norm_gated")
_COMPILED = {"mode": 3, "backend": "eager", "custom_ops": ["all", *_NORMS]}
#: Graphs to vLLM's compilation config.
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mode": 0, "cudagraph_mode": "NONE"},
    "decodes": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {**_COMPILED, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "full": {**_COMPILED, "cudagraph_mode": "FULL"},
}
#: Requests that an engine has room for, at least: vLLM's default on most GPUs, with which its CUDA
#: graphs reach to 512 tokens. A step with a prompt seldom has more.
_ROOM = 256
_AHEAD = {"num_speculative_tokens": 3}
#: Drafters to vLLM's speculative config; the head of "eagle" is generated beside the model.
DRAFTS: Mapping[str, Mapping[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_max": 3, **_AHEAD},
    "ngram_gpu": {"method": "ngram_gpu", "prompt_lookup_max": 3, **_AHEAD},
    "eagle": {"method": "eagle", **_AHEAD},
}

#: The tokenizer takes each word as a token.
_TEMPLATE = "{% for each in messages %}{{ each['content'] }} {% endfor %}"


def write(directory: Path, name: str) -> None:
    """Write the model of an engine, its tokenizer into ``tokenizer``, and a head into ``eagle``.

    The Rust front end takes a tokenizer beside the model alone.
    """
    engine = ENGINES[name]
    fields = {"max_position_embeddings": engine.length, **engine.model}
    model.write(directory, **fields)
    model.write(directory / "eagle", **{**fields, **model.EAGLE})
    for folder in (directory / "tokenizer", directory):
        model.write_tokenizer(folder, engine.vocabulary, chat_template=_TEMPLATE)


def sizes(name: str, requests: int = 0) -> dict[str, Any]:
    """Return the arguments of an engine that is to have this many requests at a time."""
    engine = ENGINES[name]
    return {
        "seed": 0,
        "load_format": "dummy",
        "max_model_len": engine.length,
        "max_num_seqs": max(requests, _ROOM, *engine.concurrency),
        "max_num_batched_tokens": 8192,
        **engine.settings,
    }


def arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an engine.

    Args:
        spec: of :mod:`bench.child`: "engine", a name of :data:`bench.loops.rows.ENGINES`;
            "models", the directory of its model's; "graphs", a name of :data:`GRAPHS`; "drafts",
            a name of :data:`DRAFTS`; "thinking", whether the engine knows the markers of thinking;
            and the share of "memory".
    """
    from vllm.config.reasoning import ReasoningConfig
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    directory, (start, end) = Path(spec["models"]) / spec["engine"], MARKERS
    drafts = DRAFTS[spec["drafts"]]
    if drafts and drafts["method"] == "eagle":
        drafts = {**drafts, "model": str(directory / "eagle")}
    known = ReasoningConfig(reasoning_start_str=start, reasoning_end_str=end)
    # For the executor's name vLLM starts another process on a CPU.
    alone = {"distributed_executor_backend": UniProcExecutor} if current_platform.is_cpu() else {}
    return {
        **sizes(spec["engine"]),
        "model": str(directory),
        "tokenizer": str(directory / "tokenizer"),
        **memory(spec["memory"]),
        "disable_log_stats": True,
        "compilation_config": dict(GRAPHS[spec["graphs"]]),
        "speculative_config": drafts and dict(drafts),
        "reasoning_config": known if spec["thinking"] else None,
        **alone,
    }
