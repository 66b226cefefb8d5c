"""Generate with one engine, and stamp each of its outputs with the client's clock.

    python probed.py MODEL_DIR OUT.json [asynchronous]

Writes each request's tokens, and when each step's outputs reached the client, by
``time.perf_counter_ns``. The environment configures the probe.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from demo.model import write
from support.engine_loop import Arrival, build_engine, run_requests

#: Steps take some 20 ms; the way from one process to another is short beside that.
LARGER = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 32000}
REQUESTS = 8
LENGTH = 50
#: None of these ends a request early.
SETTINGS: list[dict[str, Any]] = [{}, {"presence_penalty": 1.5}, {"logprobs": 2}]


def main(model: Path, out: Path, mode: str = "") -> None:
    """Run all requests, and write tokens and times."""
    size = {"vocab_size": 1009} if mode else LARGER
    engine = build_engine(
        write(model.with_name(f"probed {mode}".strip()), **size),
        load_format="dummy",
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.3,
        async_scheduling=bool(mode),
        fail_on_environ_validation=True,
    )
    get_output = engine.engine_core.get_output
    stamps: list[int] = []

    def stamped() -> Any:
        outputs = get_output()
        if outputs.outputs:
            stamps.append(time.perf_counter_ns())
        return outputs

    engine.engine_core.get_output = stamped
    requests = [
        Arrival(
            str(n),
            [3 + 7 * k * (n + 1) % 900 for k in range(16)],
            {"max_tokens": LENGTH, "ignore_eos": True, **SETTINGS[n % len(SETTINGS)]},
        )
        for n in range(REQUESTS)
    ]
    outputs, _ = run_requests(engine, requests)
    tokens = [outputs[request.name]["tokens"] for request in requests]
    out.write_text(json.dumps({"tokens": tokens, "stamps": stamps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
