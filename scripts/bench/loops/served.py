"""vLLM's AsyncLLM under closed-loop traffic, its engine core in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.processes import cores, disturbances, snapshot
from bench.loops.arguments import arguments
from bench.loops.rows import SHAPES, Request, quantiles, request
from bench.run import BUSY

#: Seconds for aborted requests to leave the engine.
_REST = 0.3
#: Seconds between readings of the device's utilization, which the driver updates as often.
_READING = 0.2


class Served:
    """An engine and its clients.

    Args:
        spec: see :func:`bench.loops.arguments.arguments`; and the "seconds" of a slice after its
            "ramp", seconds of traffic that are not measured.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> AsyncLLM:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(spec)))

        self._spec, self._loop = spec, asyncio.new_event_loop()
        self._engine: Any = self._loop.run_until_complete(start())
        #: For each output: its arrival, seconds waited for it, number of tokens, and whether it is
        #: the first of its request.
        self._arrivals: list[tuple[float, float, int, bool]] = []

    def warm_up(self, case: tuple[str, str], seed: int) -> None:
        """Send a short request from each place."""

        async def send() -> None:
            places = range(SHAPES[case[0]].concurrency)
            await asyncio.gather(*(self._send(request(case, seed, n, -1)) for n in places))

        self._loop.run_until_complete(send())

    def measure(self, case: tuple[str, str], seed: int) -> dict[str, Any]:
        """Measure a slice; return its "figures" and "noise"."""
        return self._loop.run_until_complete(self._measure(case, seed))

    def shutdown(self) -> None:
        """End the engine core."""
        self._engine.shutdown()

    async def _measure(self, case: tuple[str, str], seed: int) -> dict[str, Any]:
        async def endless(place: int) -> None:
            for number in itertools.count():
                await self._send(request(case, seed, place, number))

        self._arrivals = []
        places = range(SHAPES[case[0]].concurrency)
        loops = [asyncio.create_task(endless(place)) for place in places]
        await running(loops, self._spec["ramp"])
        process = self._engine.engine_core.resources.engine_manager.processes[0].pid
        readings: list[int] = []
        reader = asyncio.create_task(_read_utilization(readings))
        before, began = snapshot(process), time.perf_counter()
        await running(loops, self._spec["seconds"])
        ended, after = time.perf_counter(), snapshot(process)
        for task in (*loops, reader):
            task.cancel()
        await asyncio.gather(*loops, reader, return_exceptions=True)
        await asyncio.sleep(_REST)
        arrivals = [one for when, *one in self._arrivals if began <= when < ended]
        figures = {
            "tokens/s": sum(tokens for _, tokens, _ in arrivals) / (ended - began),
            **quantiles("ITL", [waited for waited, _, first in arrivals if not first]),
            **quantiles("TTFT", [waited for waited, _, first in arrivals if first]),
            "engine core's cores": sum(cores(before, after).values()),
        }
        if readings:
            figures[BUSY] = statistics.mean(readings)
        return {"figures": figures, "noise": disturbances(before, after)}

    async def _send(self, one: Request) -> None:
        """Send a request, and note its outputs as they come."""
        first, last = True, time.perf_counter()
        outputs = self._engine.generate(one.prompt, one.sampling, one.name)
        async for output in outputs:
            now, (piece,) = time.perf_counter(), output.outputs
            self._arrivals.append((now, now - last, len(piece.token_ids), first))
            first, last = False, now


async def running(loops: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Let endless loops run for a time; raise what one of them raises."""
    done, _ = await asyncio.wait(loops, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for loop in done:
        loop.result()


async def _read_utilization(readings: list[int]) -> None:
    """Append the percentage of time in which the device ran a kernel; nothing without a GPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
    while True:
        await asyncio.sleep(_READING)
        readings.append(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
