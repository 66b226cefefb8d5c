"""Measure the engines of one kind in this process, step by step by turns.

    python -m bench.runners.child OUT LOAD

LOAD is a :class:`~bench.runners.cases.Load` as JSON. OUT gets JSON, anew after each case: the
device, which classes each engine runs, and the times, calls and token digests of each case.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import pin

from bench.compare.machine import PIN
from bench.reports.run_file import replace
from bench.runners import calls
from bench.runners.cases import KINDS, SIDES, WARMUP, Case, Load, order
from bench.runners.engine import Engine, described
from bench.runners.figures import PARTS, summary
from bench.runners.twins import Twins

#: Steps before the traced ones, and traced ones.
_TRACED = (4, 6)

Engines = Mapping[str, Engine]


def measure(load: Load, home: Path, write: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure every case.

    Args:
        load: what to measure.
        home: directory for the generated model.
        write: is given the result after each case.
    """
    import torch

    gpu = torch.cuda.is_available()
    pinned = pin.loads(PIN.read_text())
    stock = Path(load.stock)
    twins = Twins(stock, pinned.upstream)
    engines, failed = _engines(KINDS[load.kind].sides(gpu), load, twins, home)
    files = {path: Path(str(twin.__file__)) for path, twin in twins.loaded.items()}
    cases: dict[str, Any] = {}
    result = {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "kind": load.kind,
        "failed": failed,
        "async": {name: engine.asynchronous for name, engine in engines.items()},
        "proof": {name: engine.proof(stock) for name, engine in engines.items()},
        "twins": [described(path, file) for path, file in files.items()],
        "shared": twins.shared,
        "cases": cases,
    }
    synchronize: Callable[[], None] = torch.accelerator.synchronize if gpu else lambda: None
    gc.collect()
    gc.freeze()
    gc.disable()
    for case in load.cases:
        cases[case.name] = _timed(engines, case, load, synchronize)
        write(result)
    if gpu and load.calls:
        for engine in engines.values():
            engine.mark()
        for case in load.cases:
            cases[case.name]["calls"] = _traced(engines, case, home, synchronize)
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
            part: summary(
                {
                    name: [lap.get(part, 0) / 1e3 for lap in taken[WARMUP:]]
                    for name, taken in laps.items()
                }
            )
            for part in PARTS
        },
        "tokens": {name: engine.digest() for name, engine in engines.items()},
        "count": {name: sum(map(len, one.tokens.values())) for name, one in engines.items()},
        "drafts": {name: engine.drafted / len(laps[name]) for name, engine in engines.items()},
    }
    for engine in engines.values():
        engine.end()
    return result


def _steps(
    engines: Engines, case: Case, steps: int, synchronize: Callable[[], None]
) -> dict[str, list[dict[str, int]]]:
    """Begin a case and take steps by turns; return those of each engine."""
    laps: dict[str, list[dict[str, int]]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.begin(case)
    for number in range(steps):
        for name in order(number, tuple(engines)):
            synchronize()
            laps[name].append(engines[name].step())
    return laps


def _traced(
    engines: Engines, case: Case, home: Path, synchronize: Callable[[], None]
) -> dict[str, dict[str, float]]:
    """Return the CUDA calls of each engine and function, a step."""
    from torch.profiler import ProfilerActivity, profile

    before, steps = _TRACED
    _steps(engines, case, before, synchronize)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for number in range(steps):
            for name in order(number, tuple(engines)):
                synchronize()
                engines[name].step()
        synchronize()
    trace = home / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    for engine in engines.values():
        engine.end()
    return calls.count(events, steps)


def main(argv: Sequence[str]) -> None:
    """Measure, and write the JSON."""
    out, load = argv
    with tempfile.TemporaryDirectory() as scratch:
        measure(
            Load(**json.loads(load)),
            Path(scratch),
            lambda result: replace(Path(out), json.dumps(result)),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
