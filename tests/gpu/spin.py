"""Measure the time that each thread of an engine keeps a core busy, with two GPUs.

    python spin.py MODEL_DIR OUT.json [blocking] [one]

500 steps decode a batch of 32 with a 0.5B shape under tensor parallelism. OUT.json gets seconds
of CPU by second of wall time for the busiest threads of the engine's process and of each worker,
and tokens a second. With ``blocking``, the events that workers wait for put the waiting thread to
sleep; by default they spin. ``one`` takes one GPU, and a worker in the engine's process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
from bench.models import HALF_B
from demo.model import write
from support.engine_loop import Arrival, build_engine

REQUESTS = 32
WARM, STEPS = 60, 500
#: Threads that take less of a core are left out.
LEAST = 0.02


def sleep_in_events(worker: Any) -> None:
    """In a worker's process, make the events that the host waits for blocking."""
    import torch

    # torch.Event takes the argument and ignores it.
    class Blocking(torch.cuda.Event):  # type: ignore[misc]
        def __new__(cls, *_: object, enable_timing: bool = False, **__: object) -> Any:
            return super().__new__(cls, enable_timing=enable_timing, blocking=True)

    torch.Event = Blocking
    runner = worker.model_runner
    if getattr(runner, "prepare_inputs_event", None) is not None:
        runner.prepare_inputs_event = Blocking()


def pid(_: Any) -> int:
    """Return a worker's process."""
    return os.getpid()


def busy(process: int) -> dict[str, float]:
    """Seconds of CPU by thread, whose name is its own and its number."""
    ticks = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        name, _, fields = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
        user, system = fields.split()[11:13]
        seconds[f"{name} {task.name}"] = (int(user) + int(system)) / ticks
    return seconds


def main(model: Path, out: Path, *words: str) -> None:
    """Decode, and write what each thread took."""
    engine = build_engine(
        write(model.with_name("half-b"), **HALF_B),
        load_format="dummy",
        tensor_parallel_size=1 if "one" in words else 2,
        gpu_memory_utilization=0.3,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        async_scheduling=True,
        enforce_eager=False,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [REQUESTS],
        },
    )
    workers = engine.collective_rpc(pid)
    if "blocking" in words:
        engine.collective_rpc(sleep_in_events)
    params = {"max_tokens": WARM + STEPS + 100, "ignore_eos": True}
    for number in range(REQUESTS):
        Arrival(str(number), [3 + number, *range(5, 20)], params).add_to(engine)
    for _ in range(WARM):
        engine.step()
    processes = {"engine": os.getpid()} | {f"worker {n}": p for n, p in enumerate(workers)}
    before = {name: busy(process) for name, process in processes.items()}
    began = time.perf_counter()
    tokens = sum(len(each.outputs) for _ in range(STEPS) for each in engine.step())
    wall = time.perf_counter() - began
    report: dict[str, Any] = {"words": words, "wall": wall, "steps/s": STEPS / wall}
    for name, process in processes.items():
        spent = {
            thread: (seconds - before[name].get(thread, 0.0)) / wall
            for thread, seconds in busy(process).items()
        }
        report[name] = {k: round(v, 3) for k, v in sorted(spent.items()) if v >= LEAST}
        report[f"{name}, cores"] = round(sum(spent.values()), 3)
    assert tokens >= REQUESTS * (STEPS - 2)
    out.write_text(json.dumps(report, indent=1))
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
