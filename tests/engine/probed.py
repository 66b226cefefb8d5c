"""Generate with one engine, and count its outputs.

    python probed.py MODEL_DIR OUT.json [asynchronous]

Writes each request's tokens, and the number of steps whose outputs reached the client. The
environment configures the probe.
"""

import json
import sys
from pathlib import Path
from typing import Any

from demo.model import write
from support.engine_loop import Arrival, build_engine, run_requests

REQUESTS = 8
LENGTH = 50
#: None of these ends a request early.
SETTINGS: list[dict[str, Any]] = [{}, {"presence_penalty": 1.5}, {"logprobs": 2}]


def main(model: Path, out: Path, mode: str = "") -> None:
    """Run all requests, and write tokens and steps."""
    engine = build_engine(
        write(model.with_name(f"probed {mode}".strip()), vocab_size=1009),
        load_format="dummy",
        max_num_seqs=REQUESTS,
        gpu_memory_utilization=0.3,
        async_scheduling=bool(mode),
        fail_on_environ_validation=True,
    )
    get_output = engine.engine_core.get_output
    steps = 0

    def counted() -> Any:
        nonlocal steps
        outputs = get_output()
        steps += bool(outputs.outputs)
        return outputs

    engine.engine_core.get_output = counted
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
    out.write_text(json.dumps({"tokens": tokens, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
