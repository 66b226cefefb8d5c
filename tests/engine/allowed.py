"""Requests of which every fourth has allowed tokens.

They arrive over many steps, prompts are prefilled in chunks, and decodes are reordered before
prefills, as many GPU backends require. All are greedy: a request's tokens must not depend on
which other tokens a step computes.
"""

import random
from typing import Any

from support.checkpoint import VOCABULARY
from support.engine_loop import Arrival, run_requests

REQUESTS = 96
#: One in so many has allowed tokens.
EVERY = 4
#: The most tokens of a step; all requests run once with each.
BUDGETS = (24, 48)


def allowed(number: int) -> list[int] | None:
    """Return the tokens that a request may give, a seventh of all; None for any."""
    return list(range(number % 7, VOCABULARY, 7)) if number % EVERY == 1 else None


def run(engine: Any) -> dict[str, Any]:
    """Run all requests with each budget.

    Returns:
        Each request's tokens, by budget, and the number of swapped rows.
    """
    engine.collective_rpc(_reorder)
    tokens = {}
    for budget in BUDGETS:
        engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = budget
        outputs, _ = run_requests(engine, _requests(budget))
        tokens[budget] = [outputs[f"{budget}-{number}"]["tokens"] for number in range(REQUESTS)]
    (swaps,) = engine.collective_rpc(_swaps)
    return {"tokens": tokens, "swaps": swaps}


def _requests(budget: int) -> list[Arrival]:
    chance = random.Random(96)
    arrivals = []
    for number in range(REQUESTS):
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice([4, 9, 20, 33]))
        params = {
            "max_tokens": chance.randint(2, 16),
            "ignore_eos": True,
            "allowed_token_ids": allowed(number),
        }
        arrivals.append(Arrival(f"{budget}-{number}", prompt, params, step=number))
    return arrivals


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
