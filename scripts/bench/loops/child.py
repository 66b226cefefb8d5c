"""Keep an engine, and its warm-up and traffic a slice at a time, as the parent asks for them.

    python -m bench.loops.child OUT SPEC

SPEC is a :class:`Spec` as JSON. :mod:`bench.engines.turns` is how warm-ups and slices are
asked for.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from demo import model

from bench import thinking
from bench.engines import turns
from bench.engines.arguments import GENERATED
from bench.loops.rows import ENGINES, SHAPES, Source
from bench.loops.tables import COMPILED

#: The directory of everything that is compiled, for vLLM, Triton and inductor.
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
#: Graphs to vLLM's compilation config. The eager backend has production's graphs without the
#: minutes that inductor takes.
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mode": 0, "cudagraph_mode": "NONE"},
    "piecewise": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "full": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL"},
}


class Spec(NamedTuple):
    """Measurement of one engine process.

    Attributes:
        slices: shape, row and seed of each slice, in order.
        graphs: a name of :data:`GRAPHS`.
        thinking: whether the engine knows the markers of :mod:`bench.thinking`.
        steps: whether the engine is in the child's process, and its steps are timed.
        cores: the CPUs that the child may use.
        memory: the share of the GPU's memory.
        ramp: seconds of traffic before the measured ones of a slice.
        seconds: that are measured.
    """

    slices: Sequence[tuple[str, str, int]]
    graphs: str
    thinking: bool
    steps: bool
    cores: Sequence[int]
    memory: float
    ramp: float
    seconds: float


def main(out: Path, spec: Spec) -> None:
    """Start the engine, and measure each slice."""
    os.sched_setaffinity(0, spec.cores)

    from vllm.platforms import current_platform

    device = "CPU" if current_platform.is_cpu() else current_platform.get_device_name()
    engine = start(spec, out.with_suffix(".model"))
    gc.collect()
    gc.freeze()
    seen = compiled()
    turns.ready(out)
    asked = turns.asked(out)
    for shape, row, seed in spec.slices:
        source, answer, began = Source(SHAPES[shape], row, seed), next(asked), time.perf_counter()
        engine.warm_up(source)
        warmup = time.perf_counter() - began
        # Both sides begin together, whichever of them had something to compile.
        turns.answer(answer, {})
        answer = next(asked)
        figures = engine.measure(source, spec.ramp, spec.seconds)
        now = compiled()
        names = sorted((Counter(now) - Counter(seen)).elements())
        figures = {**figures, "warm-up s": warmup, COMPILED: names}
        seen = now
        turns.answer(answer, {"device": device, "figures": figures})
    engine.shutdown()


def start(spec: Spec, home: Path) -> Any:
    """Start an engine with a generated model; return a Served, or a Stepped."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from bench.loops.served import Served
    from bench.loops.stepped import Stepped

    engine = ENGINES[SHAPES[spec.slices[0][0]].engine]
    written = model.write(home, **{"max_position_embeddings": engine.length, **engine.model})
    arguments: dict[str, Any] = {
        **GENERATED,
        "model": str(written),
        "seed": 0,
        "max_model_len": engine.length,
        "max_num_seqs": max(engine.concurrency),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": spec.memory,
        "disable_log_stats": True,
        "compilation_config": dict(GRAPHS[spec.graphs]),
        "reasoning_config": thinking.config() if spec.thinking else None,
    }
    if current_platform.is_cpu():  # for which vLLM starts another process, unless by the class
        arguments["distributed_executor_backend"] = UniProcExecutor
    return (Stepped if spec.steps else Served)(arguments)


def compiled() -> list[str]:
    """Return the names of what Triton and inductor have compiled in this side's caches."""
    root = Path(os.environ[CACHES[0]])
    return [
        file.stem if suffix == "ttir" else "a C++ kernel"
        for suffix in ("ttir", "cpp")
        for file in root.rglob(f"*.{suffix}")
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Spec(**json.loads(sys.argv[2])))
