"""Keep an engine, and measure its slices on request.

    python -m bench.loops.child OUT SPEC

SPEC is a :class:`Spec` as JSON. Each slice takes two equal requests (:mod:`bench.harness.kept`),
for the warm-up and for the slice: the shape and the row, and the seed.
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
from bench.harness import kept
from bench.loops.rows import ENGINES, SHAPES, Source
from bench.models import GENERATED, memory
from bench.results.slices import COMPILED

#: The directory of everything that is compiled, for vLLM, Triton and inductor.
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
#: Graphs to vLLM's compilation config. The eager backend has production's graphs without the
#: minutes that inductor takes.
GRAPHS: Mapping[str, Mapping[str, Any]] = {
    "none": {"mode": 0, "cudagraph_mode": "NONE"},
    "decodes": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    "piecewise": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "full": {"mode": 3, "backend": "eager", "cudagraph_mode": "FULL"},
}


class Spec(NamedTuple):
    """Measurement of one engine process.

    Attributes:
        engine: a name of :data:`bench.loops.rows.ENGINES`.
        kind: "served" for AsyncLLM; "timed" for an engine in the child's process, with its
            steps timed.
        graphs: a name of :data:`GRAPHS`.
        thinking: whether the engine knows the markers of :mod:`bench.thinking`.
        cores: the CPUs that the child may use.
        memory: the share of the GPU's memory.
        ramp: seconds of traffic before the measured ones of a slice.
        seconds: that are measured.
    """

    engine: str
    kind: str
    graphs: str
    thinking: bool
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
    kept.ready(out)
    asked = kept.asked(out)
    for warmed_up, ((shape, row), seed) in asked:
        source = Source(SHAPES[shape], row, seed)
        began = time.perf_counter()
        engine.warm_up(source)
        warmup = time.perf_counter() - began
        # Both sides begin together, whichever of them had something to compile.
        kept.answer(warmed_up, {})
        answer, _ = next(asked)
        measured = engine.measure(source, spec.ramp, spec.seconds)
        now = compiled()
        names = sorted((Counter(now) - Counter(seen)).elements())
        measured["figures"] |= {"warm-up s": warmup, COMPILED: names}
        seen = now
        kept.answer(answer, {"device": device, **measured})
    engine.shutdown()


def start(spec: Spec, home: Path) -> Any:
    """Start an engine."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from bench.loops.served import Served
    from bench.loops.timed import Timed

    engine = ENGINES[spec.engine]
    written = model.write(home, **{"max_position_embeddings": engine.length, **engine.model})
    arguments: dict[str, Any] = {
        **GENERATED,
        "model": str(written),
        "seed": 0,
        "max_model_len": engine.length,
        "max_num_seqs": max(engine.concurrency),
        "max_num_batched_tokens": 8192,
        **memory(spec.memory),
        "disable_log_stats": True,
        "compilation_config": dict(GRAPHS[spec.graphs]),
        "reasoning_config": thinking.config() if spec.thinking else None,
    }
    if current_platform.is_cpu():
        # For its name vLLM starts another process.
        arguments["distributed_executor_backend"] = UniProcExecutor
    return {"served": Served, "timed": Timed}[spec.kind](arguments)


def compiled() -> list[str]:
    """Return the names of the kernels that Triton and inductor have compiled for this side."""
    root = Path(os.environ[CACHES[0]])
    return [
        file.stem if suffix == "ttir" else "a C++ kernel"
        for suffix in ("ttir", "cpp")
        for file in root.rglob(f"*.{suffix}")
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Spec(**json.loads(sys.argv[2])))
