"""Run a few requests on an engine of two ranks.

    python ranked.py MODEL_DIR OUT.json [NODE PORT]

OUT.json holds each request's token ids. With a NODE, 0 or 1, each rank is a node of its own, and
node 1 runs no request; both are given one free PORT. Ranks of one node are told apart by plugins
of vLLM, which each worker loads: :func:`other_switch`.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.generate import DTYPE
from support.checkpoint import generate
from support.engine_loop import Arrival, build_engine, run_requests

#: The log's text if ranks differ.
DIFFERENT = "the ranks of this engine run different overlays"
#: Seconds that ranks wait for one without the overlay.
PATIENCE = 5.0


def _on_rank_1(change: Callable[[], None]) -> None:
    """Change the second rank when it makes its device, before it makes its model runner."""
    from vllm.v1.worker import gpu_worker

    join = gpu_worker.init_worker_distributed_environment

    def then_change(config: Any, rank: int, *rest: Any, **named: Any) -> None:
        join(config, rank, *rest, **named)
        if rank == 1:
            change()

    gpu_worker.init_worker_distributed_environment = then_change
    if worker := sys.modules.get("vllm.v1.worker.cpu_worker"):
        worker.init_worker_distributed_environment = then_change  # type: ignore[attr-defined]


def other_switch() -> None:
    """Give the second rank another VLLM_READINESS, as another node's shell may."""
    _on_rank_1(lambda: os.environ.__setitem__("VLLM_READINESS", "-penalties"))


def hasty() -> None:
    """Wait only seconds for a rank that does not answer."""
    from vllm.v1.readiness.engine import ranks

    ranks.PATIENCE = PATIENCE


def work(model: Path, arguments: dict[str, Any]) -> None:
    """Be the second node, until its rank ends."""
    from vllm import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = {**arguments, "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(
        model=str(model), enforce_eager=True, enable_prefix_caching=False, **arguments
    ).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def main(model: Path, out: Path, node: str = "", port: str = "") -> None:
    """Run the requests, and write their tokens."""
    arguments: dict[str, Any] = {
        "dtype": DTYPE,
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 64 << 20,
    }
    if node:
        arguments |= {"nnodes": 2, "node_rank": int(node), "master_port": int(port)}
        arguments |= {"master_addr": "127.0.0.1", "distributed_executor_backend": "mp"}
    if node == "1":
        work(generate(model), arguments)
        return
    engine = build_engine(generate(model), **arguments)
    requests = [
        Arrival(str(number), [number + 3, 11, 7], {"max_tokens": 8, "presence_penalty": 1.0})
        for number in range(4)
    ]
    outputs, _ = run_requests(engine, requests)
    out.write_text(json.dumps([outputs[request.name]["tokens"] for request in requests]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
