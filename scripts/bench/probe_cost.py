"""Measure what the probe costs the host in one step.

    PYTHONPATH=scripts PYTHON -m bench.probe_cost [--steps N] [--turns N] [--json FILE]

PYTHON is one that can import vLLM. Stand-ins that do next to nothing take the place of the
scheduler, the runner and its outputs; on a CUDA device they record an event and wait for it, as
the real ones do. A step of theirs is timed without the probe and under it, and the difference is
the probe's cost. (In a running engine it drowns in the noise of the host.) The asynchronous step
ends with a pristine runner's output; the synchronous one with the overlay's readback and a list.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vllm.v1
from overlay import output

from bench.compare.installations import ROOT
from bench.compare.machine import describe
from bench.reports.markdown import publish

#: The step that the cost is compared with, in microseconds.
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
    """Stand-in for upstream's scheduler."""

    vllm_config = CONFIG

    def schedule(self) -> Any:
        """Return the same batch each time."""
        return SCHEDULED

    def update_from_output(self, _: object) -> None:
        """Do nothing."""


class Output:
    """Stand-in for an asynchronous output."""

    def __init__(self, gpu: bool) -> None:
        self.async_copy_ready_event = torch.Event() if gpu else None
        if self.async_copy_ready_event is not None:
            self.async_copy_ready_event.record()

    def get_output(self) -> None:
        """Wait for the event, if there is one."""
        if self.async_copy_ready_event is not None:
            self.async_copy_ready_event.synchronize()


class Outputs:
    """Stand-in for the overlay's readback."""

    def __init__(self, gpu: bool) -> None:
        self.gpu = gpu

    def show(self, _: None) -> torch.Tensor:
        """Return tokens on the host, after an event if there is a device."""
        if self.gpu:
            event = torch.Event()
            event.record()
            event.synchronize()
        return SHOWN


class Runner:
    """Stand-in for the model runner."""

    vllm_config = CONFIG

    def __init__(self, gpu: bool, synchronous: bool) -> None:
        self.gpu = gpu
        self.outputs = Outputs(gpu) if synchronous else None

    def execute_model(self, _: Any) -> None:
        """Do nothing."""

    def sample_tokens(self, _: None) -> Any:
        """Return an asynchronous output, or tokens."""
        if self.outputs is None:
            return Output(self.gpu)
        return self._to_list(self.outputs.show(None))

    def _to_list(self, shown: torch.Tensor) -> torch.Tensor:
        return shown


def _write_nothing(_: object) -> None:
    """Take the place of writing a file."""


def step_time(gpu: bool, steps: int, synchronous: bool) -> float:
    """Return the microseconds of a step."""
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
    parser.add_argument("--json", type=Path, help="also write the run to this file")
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
    recorder.Recorder.write = _write_nothing  # type: ignore[method-assign, assignment]
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
        before = recorder.recorder().ring.count
        with_probe = measured(mode)
        records = (recorder.recorder().ring.count - before) / (args.steps * args.turns)
        cost = with_probe - without[name]
        times = [without[name], with_probe, cost, cost / STEP * 100]
        rows.append([f"{name}, {what}", round(records, 1), *times])
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
    return publish(run, args.json)


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
