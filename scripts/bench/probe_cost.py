"""What the probe costs the host in one step.

    PYTHON scripts/bench/probe_cost.py [--steps N] [--turns N] [--json FILE]

PYTHON is one that can import vLLM. Stand-ins that do next to nothing take the place of the
scheduler, the runner and its outputs; on a CUDA device they record an event and wait for it, as
the real ones do. What a step of theirs takes is measured without the probe and under it: the
difference is everything that the probe does in a step. (In a running engine it drowns in the
noise of the host.) Scheduled asynchronously, the step's output is taken as one of the pristine
runner's; synchronously, it is shown and made a list of, as on the overlay.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT / "scripts")

import torch  # noqa: E402
import vllm.v1  # noqa: E402
from bench import report  # noqa: E402
from bench.machine import describe  # noqa: E402
from overlay import output  # noqa: E402

#: The step that the cost is held against, in microseconds.
STEP = 4000.0
CONFIG = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0, data_parallel_index=0, data_parallel_size=1)
)
SCHEDULED = SimpleNamespace(
    total_num_scheduled_tokens=128,
    num_scheduled_tokens={"0": 1},
    scheduled_cached_reqs=SimpleNamespace(req_ids=[str(n) for n in range(128)]),
)


SHOWN = torch.zeros(128, 1, dtype=torch.int32)


class Scheduler:
    """Stands for upstream's."""

    vllm_config = CONFIG

    def schedule(self) -> Any:
        """What the runner is to do."""
        return SCHEDULED

    def update_from_output(self, _: object) -> None:
        """Nothing."""


class Output:
    """Stands for what a step hands out later."""

    def __init__(self, gpu: bool) -> None:
        self.async_copy_ready_event = torch.Event() if gpu else None
        if self.async_copy_ready_event is not None:
            self.async_copy_ready_event.record()

    def get_output(self) -> None:
        """Wait, if there is something to wait for."""
        if self.async_copy_ready_event is not None:
            self.async_copy_ready_event.synchronize()


class Outputs:
    """Stands for the overlay's."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu

    def show(self, _: None) -> torch.Tensor:
        """What has been sampled, on the host; wait, if there is something to wait for."""
        if self.gpu:
            event = torch.Event()
            event.record()
            event.synchronize()
        return SHOWN


class Runner:
    """Stands for the model runner."""

    vllm_config = CONFIG

    def __init__(self, gpu: bool, synchronous: bool) -> None:
        self.gpu = gpu
        self.outputs = Outputs(gpu) if synchronous else None

    def execute_model(self, _: Any) -> None:
        """Nothing."""

    def sample_tokens(self, _: None) -> Any:
        """An output, or a list."""
        if self.outputs is None:
            return Output(self.gpu)
        return self._to_list(self.outputs.show(None))

    def _to_list(self, shown: torch.Tensor) -> torch.Tensor:
        """Nothing that takes time."""
        return shown


def _nothing(_: object) -> None:
    """In place of writing a file."""


def step_time(gpu: bool, steps: int, synchronous: bool) -> float:
    """Microseconds of a step."""
    scheduler, runner = Scheduler(), Runner(gpu, synchronous)
    start = time.perf_counter()
    for _ in range(steps):
        runner.execute_model(scheduler.schedule())
        output = runner.sample_tokens(None)
        if not synchronous:
            output.get_output()
        scheduler.update_from_output(output)
    return (time.perf_counter() - start) / steps * 1e6


def main(argv: Sequence[str]) -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=5000, help="of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=7, help="with and without (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the run to this file, too")
    args = parser.parse_args(argv)
    started = time.monotonic()
    if not hasattr(vllm.v1, "readiness"):
        vllm.v1.__path__.append(str(ROOT / "vendor_overlay" / "vllm" / "v1"))
    from vllm.v1.readiness.probe import events, methods, recorder

    gpu = torch.cuda.is_available()
    modes = {"asynchronous": False, "synchronous": True}

    def measured(synchronous: bool) -> float:
        return statistics.median(step_time(gpu, args.steps, synchronous) for _ in range(args.turns))

    without = {name: measured(mode) for name, mode in modes.items()}
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    recorder._path = str(folder / "probe-cost")  # for the figures of /metrics; no records
    recorder.Recorder.write = _nothing  # type: ignore[method-assign, assignment]
    events.watch()
    modules = ModuleType("runner"), ModuleType("scheduler"), ModuleType("outputs")
    vars(modules[0]).update(GPUModelRunner=Runner, AsyncGPUModelRunnerOutput=Output)
    vars(modules[1]).update(Scheduler=Scheduler)
    vars(modules[2]).update(Outputs=Outputs)
    methods.watch_runner(modules[0])
    methods.watch_scheduler(modules[1])
    methods.watch_overlay_outputs(modules[2])
    what = "with CUDA events" if gpu else "without events"
    rows = []
    for name, mode in modes.items():
        begun = recorder.recorder().ring.count
        on = measured(mode)
        kinds = (recorder.recorder().ring.count - begun) / (args.steps * args.turns)
        cost = on - without[name]
        rows.append(
            [f"{name}, {what}", round(kinds, 1), without[name], on, cost, cost / STEP * 100]
        )
    run: dict[str, Any] = {
        **describe("table", started, {}, torch.cuda.get_device_name() if gpu else "CPU"),
        "title": f"What the probe does in a step, microseconds of the host; median of {args.turns} "
        f"turns of {args.steps} steps of stand-ins",
        "note": None,
        "columns": ["step", "records", "without", "with", "difference", "of a 4 ms step, %"],
        "align": ["l", "r", "r", "r", "r", "r"],
        "rows": rows,
        "problems": [],
    }
    return report.publish(run, args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
