"""Measure the engines of one kind in this process; their steps are interleaved.

    python -m bench.runners.child OUT LOAD

LOAD is a :class:`~bench.runners.cases.Load` as JSON. OUT gets JSON, again after each case: the
device, doubts about each engine, and the times and token digests of each case.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import pin

from bench.harness.files import replace
from bench.harness.machine import PIN
from bench.runners.cases import KINDS, SIDES, WARMUP, Case, Load, order
from bench.runners.engine import Engine
from bench.runners.twins import Twins

Engines = Mapping[str, Engine]
#: The parts of a step in its order. The runner's own come after the part that contains them.
PARTS = (
    "schedule",
    "execute_model",
    "_update_states",
    "_prepare_inputs",
    "_build_attention_metadata",
    "sample_tokens",
    "update_from_output",
)


def measure(load: Load, home: Path, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure every case.

    Args:
        load: the measurement.
        home: directory for the generated model.
        write: is given the result after each case.
    """
    import torch

    gpu = torch.cuda.is_available()
    pinned = pin.loads(PIN.read_text())
    twins = Twins(Path(load.stock), pinned.upstream)
    engines, failed = _engines(KINDS[load.kind].sides(gpu), load, twins, home)
    cases: dict[str, Any] = {}
    result = {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "failed": failed,
        "doubts": {name: engine.doubts(twins) for name, engine in engines.items()},
        "cases": cases,
    }
    synchronize: Callable[[], None] = torch.accelerator.synchronize if gpu else lambda: None
    gc.collect()
    gc.freeze()
    gc.disable()
    for case in load.cases:
        cases[case.name] = _timed(engines, case, load, synchronize)
        write(result)


def _engines(
    names: Sequence[str], load: Load, twins: Twins, home: Path
) -> tuple[Engines, dict[str, str]]:
    """Make the engines; return them, and why there is none on Model Runner V2 if it failed."""
    engines, failed = {}, {}
    for name in names[::-1] if load.reverse else names:
        try:
            engines[name] = Engine(name, load, twins, home)
        except Exception as error:
            if SIDES[name].version == 1:
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    return {name: engines[name] for name in names if name in engines}, failed


def _timed(
    engines: Engines, case: Case, load: Load, synchronize: Callable[[], None]
) -> dict[str, Any]:
    laps = _steps(engines, case, WARMUP + load.steps, synchronize)
    result = {
        "parts": {
            part: {
                name: quantiles([lap.get(part, 0) / 1e3 for lap in taken[WARMUP:]])
                for name, taken in laps.items()
            }
            for part in PARTS
        },
        "tokens": {name: engine.digest() for name, engine in engines.items()},
    }
    for engine in engines.values():
        engine.end()
    return result


def _steps(
    engines: Engines, case: Case, steps: int, synchronize: Callable[[], None]
) -> dict[str, list[dict[str, int]]]:
    """Begin a case, and interleave steps; return the times of each engine's."""
    laps: dict[str, list[dict[str, int]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.begin(case)
    for number in range(steps):
        for name in order(number, tuple(engines)):
            synchronize()
            laps[name].append(engines[name].step())
    return laps


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": hundredths[49], "p99": hundredths[98]}


def main(argv: Sequence[str]) -> None:
    """Measure, and write the JSON."""
    out, load = argv
    with tempfile.TemporaryDirectory() as scratch:
        measure(
            Load(**json.loads(load)),
            Path(scratch),
            lambda result: replace(Path(out), json.dumps(result).encode()),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
