"""Run requests of which every fourth has allowed tokens through a real engine, step by step.

    python allowed.py MODEL_DIR OUT.json sync|async BUDGET...

All are greedy: a request's tokens must not depend on which other tokens a step computes. All run
once with each BUDGET, the most tokens of a step. They arrive over many steps, prompts are
prefilled in chunks, and decodes are reordered before prefills, as many GPU backends require.
Writes each request's tokens by budget, and the engine's statistics.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from engine.mixed import start
from support.checkpoint import VOCABULARY
from support.engine_stats import EngineStats
from support.params import sampling_params

REQUESTS = 96
#: One in so many has allowed tokens.
EVERY = 4


def allowed(number: int) -> list[int] | None:
    """The tokens that a request may give, a seventh of all; None for any."""
    return list(range(number % 7, VOCABULARY, 7)) if number % EVERY == 1 else None


def main(model: Path, out: Path, mode: str, budgets: list[int]) -> None:
    """Run every request to its end with each budget, and write what came out."""
    engine = start(model, mode == "async", blocks=256, budget=max(budgets))
    stats = EngineStats(engine)
    engine.collective_rpc(_reorder)
    results = {budget: _run(engine, budget) for budget in budgets}
    (swaps,) = engine.collective_rpc(_swaps)
    report = {"results": results, "stats": {**stats.to_json(), "swaps": swaps}}
    out.write_text(json.dumps(report))


def _run(engine: Any, budget: int) -> list[list[int]]:
    """Each request's tokens."""
    from vllm import TokensPrompt

    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.max_num_scheduled_tokens = budget
    chance = random.Random(96)
    requests = []
    for number in range(REQUESTS):
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice([4, 9, 20, 33]))
        params = sampling_params(
            max_tokens=chance.randint(2, 16),
            ignore_eos=True,
            allowed_token_ids=allowed(number),
        )
        requests.append((TokensPrompt(prompt_token_ids=prompt), params))
    tokens: dict[str, list[int]] = {}
    step = 0
    while step < REQUESTS or engine.has_unfinished_requests():
        if step < REQUESTS:
            engine.add_request(f"{budget}-{step}", *requests[step])
        step += 1
        for result in engine.step():
            if result.finished:
                tokens[result.request_id] = list(result.outputs[0].token_ids)
    return [tokens[f"{budget}-{number}"] for number in range(REQUESTS)]


def _reorder(worker: Any) -> None:
    """In the worker's process, put decodes first, and count the swaps of rows."""
    worker.model_runner.reorder_batch_threshold = 1
    batch = worker.model_runner.input_batch
    swap = batch.swap_states
    worker.swaps = 0

    def counted(one: int, other: int) -> None:
        worker.swaps += 1
        swap(one, other)

    batch.swap_states = counted


def _swaps(worker: Any) -> int:
    return int(worker.swaps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], [int(each) for each in sys.argv[4:]])
