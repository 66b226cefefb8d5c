"""Run engines one after the other in one process, and write their outputs.

    python outputs.py MODEL_DIR OUT.json REFERENCES.json PART...

Each PART is a key of :data:`PARTS`; synchronous ones come first. REFERENCES.json is the output
of a run with the part :data:`REFERENCE`, which parts on the simulated device are compared with.
Writes the report of each part, and the variables that vLLM keys its caches of compiled code by.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import mixed, simulated
from support import asynchronous, thinking
from support.engine_loop import run_requests
from support.engine_stats import EngineStats

REFERENCE = "simulated sync"
CHECK = "simulated async"
PROCESSOR = "support.processors:ForbidLatest"

Part = Callable[[Path, Path], Any]


def run_mixed(model: Path, asynchronously: bool, processors: list[str] | None = None) -> Any:
    """Run the mixed requests."""
    engine = mixed.build_small_cache(
        model,
        asynchronously,
        blocks=36,
        logits_processors=processors,
        reasoning_config=thinking.config(),
    )
    stats = EngineStats(engine)
    outputs, _ = run_requests(engine, mixed.requests())
    report = {"outputs": outputs, "stats": stats.to_json()}
    engine.engine_core.shutdown()
    return report


def run_references(model: Path) -> Any:
    """Run the requests of the simulated device, on an engine without one."""
    driver = simulated.Driver(model, asynchronous=False)
    references = driver.references()
    driver.engine.engine_core.shutdown()
    return references


PARTS: dict[str, Part] = {
    "mixed sync": lambda model, _: run_mixed(model, False),
    REFERENCE: lambda model, _: run_references(model),
    "mixed async": lambda model, _: run_mixed(model, True),
    "processor async": lambda model, _: run_mixed(model, True, [PROCESSOR]),
    CHECK: lambda model, path: simulated.check(model, json.loads(path.read_text())[REFERENCE]),
}


def main(model: Path, out: Path, references: Path, *names: str) -> None:
    """Run the named parts, and write their reports."""
    import vllm.envs
    import vllm.v1.worker.cpu_worker

    vllm.envs.validate_environ(hard_fail=True)
    report = {"factors": json.loads(json.dumps(vllm.envs.compile_factors(), default=str))}
    thinking.unpin()
    simulated_device = False
    for name in names:
        if name.endswith("async") and not simulated_device:
            asynchronous.register()
            simulated_device = True
        assert name.endswith("async") == simulated_device, "synchronous parts come first"
        report[name] = PARTS[name](model, references)
    out.write_text(json.dumps(report))
    os._exit(0)  # closing the sockets of several engines can block


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
