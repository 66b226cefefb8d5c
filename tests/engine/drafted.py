"""Run requests with the drafts of an EAGLE head, asynchronously, and write their outputs.

    python drafted.py MODEL_DIR OUT.json

Model and head have weights that vLLM draws, so that few drafts are accepted. With the overlay, the
numbers of requests that the feature ``schedule`` has served and left are written as well.
"""

import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo.model import EAGLE, write
from support import asynchronous
from support.checkpoint import VOCABULARY
from support.engine_loop import Arrival, build_engine, run_requests
from support.engine_stats import EngineStats

FIELDS = {"vocab_size": VOCABULARY, "torch_dtype": "float32"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"presence_penalty": 1.5, "logprobs": 1},
    {"repetition_penalty": 1.3},
    {"stop_token_ids": list(range(3, VOCABULARY, 3)), "ignore_eos": False},
]


def requests() -> list[Arrival]:
    """Draw the requests, the same ones each time."""
    chance = random.Random(3)
    return [
        Arrival(
            f"request-{number}",
            chance.choices(range(3, VOCABULARY), k=chance.randint(5, 90)),
            {
                "max_tokens": chance.randint(1, 120),
                "ignore_eos": True,
                **SETTINGS[number % len(SETTINGS)],
            },
            2 * number,
            2 * number + chance.randint(1, 20) if number % 9 == 8 else None,
        )
        for number in range(50)
    ]


def count_served() -> Counter[str]:
    """Count the requests that the overlay's scheduler serves and leaves from now on."""
    counts: Counter[str] = Counter()
    try:
        from vllm.v1.readiness.core.schedule import Running
    except ImportError:
        return counts
    advance = Running._advance_counts

    def counted(self: Any, preempted: bool) -> Iterator[tuple[str, int]]:
        yield from advance(self, preempted)
        counts["left"] += len(self.others)
        counts["served"] += len(self.counts) - len(self.others)

    Running._advance_counts = counted  # type: ignore[method-assign]
    return counts


def main(model: Path, out: Path) -> None:
    """Run the requests on an engine of this process."""
    asynchronous.register()
    head = write(model.with_name("head"), **FIELDS, **EAGLE)
    engine = build_engine(
        write(model.with_name("drafted"), **FIELDS),
        load_format="dummy",
        async_scheduling=True,
        speculative_config={"method": "eagle", "model": str(head), "num_speculative_tokens": 3},
        max_num_seqs=8,
        max_num_batched_tokens=64,
        disable_log_stats=False,
    )
    stats, served = EngineStats(engine), count_served()
    outputs, _ = run_requests(engine, requests())
    out.write_text(json.dumps({"outputs": outputs, "stats": stats.to_json(), "served": served}))
    os._exit(0)  # closing the sockets of the engine can block


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
