"""Arguments of vLLM for an engine of :mod:`bench.loops.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo import model

from bench import thinking
from bench.loops.rows import ENGINES
from bench.models import memory

#: Graphs to vLLM's compilation config. The eager backend has production's graphs without the
#: minutes that inductor takes.
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mode": 0, "cudagraph_mode": "NONE"},
    "decodes": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "full": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL"},
}


def arguments(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Write an engine's model, and return the engine's arguments.

    Args:
        spec: of :mod:`bench.child`: "engine", a name of :data:`bench.loops.rows.ENGINES`;
            "graphs", a name of :data:`GRAPHS`; "thinking", whether the engine knows the markers of
            :mod:`bench.thinking`; "home", the model's directory; and the share of "memory".
    """
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    engine = ENGINES[spec["engine"]]
    home = model.write(
        Path(spec["home"]), **{"max_position_embeddings": engine.length, **engine.model}
    )
    # For the executor's name vLLM starts another process on a CPU.
    alone = {"distributed_executor_backend": UniProcExecutor} if current_platform.is_cpu() else {}
    return {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "model": str(home),
        "seed": 0,
        "max_model_len": engine.length,
        "max_num_seqs": max(engine.concurrency),
        "max_num_batched_tokens": 8192,
        **memory(spec["memory"]),
        "disable_log_stats": True,
        "compilation_config": dict(GRAPHS[spec["graphs"]]),
        "reasoning_config": thinking.config() if spec["thinking"] else None,
        **alone,
    }
