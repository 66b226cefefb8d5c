"""Keep an engine or a server, and measure on request: python -m bench.child DESCRIPTOR.

Through the pipe come a spec, and then requests: "warm_up" or "measure", a case and a seed. An
answer has the "figures", and reasons why they count for no interval: "noise" of the host, which
meets both sides if they are measured at the same time, and "limits" of the measurement.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
from multiprocessing.connection import Connection


def main(pipe: Connection) -> None:
    """Start the engine, and answer each request until one is None."""
    spec = pipe.recv()
    os.sched_setaffinity(0, spec["cores"])
    import torch
    import vllm
    from vllm.platforms import current_platform

    # torch's own function makes a CUDA context, and vLLM then spawns its engine core.
    device = "CPU" if current_platform.is_cpu() else current_platform.get_device_name()
    versions = f"vLLM {vllm.__version__}, torch {torch.__version__}, "
    versions += f"Python {platform.python_version()}"
    if spec["kind"] == "served":
        from bench.loops.served import Served as Kind
    elif spec["kind"] == "timed":
        from bench.loops.timed import Timed as Kind  # type: ignore[assignment]
    else:
        from bench.servers.server import Server as Kind  # type: ignore[assignment]
    driver = Kind(spec)
    try:
        gc.collect()
        gc.freeze()
        pipe.send({"device": device, "versions": versions})
        while (request := pipe.recv()) is not None:
            work, case, seed = request
            pipe.send(getattr(driver, work)(case, seed) or {})
    finally:
        driver.shutdown()


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
