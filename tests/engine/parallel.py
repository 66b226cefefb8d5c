"""Run every kind of output on an engine of two ranks.

    python parallel.py MODEL_DIR OUT.json tensor|pipeline sync|async [TURN]

OUT.json holds the outputs of :mod:`gpu.kinds`, by request, and whether each rank had the event that
keeps a step's inputs. On a GPU, where each rank has one of its own, batches with thinking budgets
are included, and a pipeline of stock's is given the event: without it, tokens depend on the time
that things take. Stock's CPU runner cannot force a token. TURN is a file that programs lock to run
in turn: a kernel that waits for the other rank keeps the device from other engines.
"""

import contextlib
import fcntl
import importlib.util
import json
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from gpu.kinds import BATCHES, THINKING, build, requests, run

GPU = torch.cuda.is_available()
#: Of a request on a GPU: some are over before the last ones arrive.
TOKENS = 50


class Unhurried(deque[Any]):
    """The steps in flight, of which none shows that it has ended before it is taken out.

    With pipeline stages the engine core begins another step only while the oldest is running, so
    that requests would meet in batches by the time that things take.
    """

    def __getitem__(self, index: Any) -> Any:
        """Return a step that is running, whatever the index."""
        return (SimpleNamespace(done=lambda: False),)


def start(model: Path, parallel: str, scheduling: str) -> Any:
    """Start an engine whose workers are two processes.

    Args:
        model: the checkpoint's directory.
        parallel: "tensor" or "pipeline".
        scheduling: "sync" or "async".
    """
    ranks = {f"{parallel}_parallel_size": 2}
    engine = build(model, budgets=GPU, async_scheduling=scheduling == "async", **ranks)
    core = engine.engine_core.engine_core
    if core.batch_queue is not None:
        core.batch_queue = Unhurried(core.batch_queue, core.batch_queue.maxlen)
    return engine


def ordered(worker: Any) -> bool:
    """Whether a rank waits until the device has read a step's inputs."""
    return worker.model_runner.prepare_inputs_event is not None


def order(worker: Any) -> None:
    """Let a rank wait for that."""
    runner = worker.model_runner
    runner.prepare_inputs_event = runner.prepare_inputs_event or torch.Event()


def main(model: Path, out: Path, parallel: str, scheduling: str, turn: str | None = None) -> None:
    """Run every batch, and write the outputs."""
    engine = start(model, parallel, scheduling)
    events = engine.collective_rpc(ordered)
    if GPU and parallel == "pipeline" and importlib.util.find_spec("vllm.v1.readiness") is None:
        engine.collective_rpc(order)
    outputs: dict[str, Any] = {}
    with open(turn, "w") if turn else contextlib.nullcontext() as file:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        for name in (*BATCHES, *THINKING) if GPU else BATCHES:
            outputs |= run(engine, requests(name, short=not GPU, tokens=TOKENS))["results"]
    out.write_text(json.dumps({"events": events, "outputs": outputs}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
