"""Serve many steps of every kind, and write each request's output and the steps' waits.

    python long.py MODEL_DIR OUT.json ENGINE [SEED]

ENGINE is a name in :data:`ENGINES`. With a SEED, each readback is late, by up to 40 ms. First,
batches of plain requests that do not change as they decode run for STEPS steps. Then 200 mixed
requests come and go, over STEPS steps as well: the KV cache has room for few of them, prompts share
prefixes that are cached, and some requests are aborted. OUT.json holds each batch's number of steps
and a digest of each position's output, so that two runs can be compared; the calls that failed,
with their stacks; and the sync guard's reports.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from engine import mixed
from engine.generate import DTYPE, NOT_WITH_DRAFTS
from gpu import kinds, mrope, parity, waits
from support import thinking
from support.checkpoint import VOCABULARY, generate
from support.engine_loop import Arrival, build_engine
from support.engine_stats import ScheduleStats

#: At least so many steps of each kind.
STEPS = 1000
REQUESTS = 200
#: Steps between two arrivals.
APART = 5
#: Requests and tokens of a batch that does not change.
STEADY, LENGTH = 8, 400
#: Blocks of 16 tokens that are left for the mixed requests, without drafts and with them.
BLOCKS = (60, 44)
#: Prompts begin with one of so many prefixes.
PREFIXES = 4

ENGINES: dict[str, dict[str, Any]] = {
    **kinds.ENGINES,
    "mrope": kinds.ENGINES["async"],
    "mrope ngram_gpu": kinds.ENGINES["ngram_gpu"],
}
SETTINGS: list[dict[str, Any]] = [
    *mixed.SETTINGS,
    {"temperature": 0.9, "seed": 1, "ignore_eos": True},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 2, "logprobs": 2},
    {"temperature": 0.8, "min_p": 0.05, "seed": 3},
    {"temperature": 0.8, "presence_penalty": 0.7, "seed": 4, "logprobs": 1},
    {"prompt_logprobs": 3, "logprobs": 0},
    {"prompt_logprobs": -1, "frequency_penalty": 0.4},
    {"logprobs": -1},
    {"logprobs": 20, "bad_words": mixed.STUTTERS, "temperature": 1.0, "top_k": 9, "seed": 5},
    {"structured_outputs": "parity", "logprobs": 1},
    {"structured_outputs": "parity", "presence_penalty": 1.1},
]


def steady(wave: int) -> list[Arrival]:
    """Return plain requests, all of which are there from the first step to the last."""
    chance = random.Random(wave)
    params = {"max_tokens": LENGTH, "ignore_eos": True}
    return [
        Arrival(f"steady {wave} {number}", chance.choices(range(3, VOCABULARY), k=12), params)
        for number in range(STEADY)
    ]


def requests(drafts: bool, grammars: bool) -> list[Arrival]:
    """Draw the mixed requests, the same ones each time.

    Args:
        drafts: leave out what vLLM refuses with drafts.
        grammars: whether requests may have one.
    """
    chance = random.Random(200)
    heads = [chance.choices(range(3, VOCABULARY), k=48) for _ in range(PREFIXES)]
    settings = [each for each in SETTINGS if not (drafts and each.keys() & NOT_WITH_DRAFTS)]
    arrivals = []
    for number in range(REQUESTS):
        step = APART * number
        params = {"max_tokens": chance.randint(25, 110), **settings[number % len(settings)]}
        if not torch.cuda.is_available():  # stock's CPU runner fails with chunked prompts
            params = {k: v for k, v in params.items() if k not in ("seed", "temperature")}
        # Some are periodic, so that drafts are made from the first step on.
        period = chance.choice([3, 7, 400])
        pool = chance.choices(range(3, VOCABULARY), k=period)
        body = [pool[place % period] for place in range(chance.choice([2, 9, 20, 60, 150]))]
        prompt = heads[number % PREFIXES][: chance.choice([0, 16, 48])] + body
        if "thinking_token_budget" in params:
            prompt += thinking.START
        if params.pop("structured_outputs", None) and grammars:
            from vllm.sampling_params import StructuredOutputsParams

            params["structured_outputs"] = StructuredOutputsParams(regex="parity")
        aborted = step + chance.choice([0, 1, 2, 5, 12, 20]) if number % 8 == 5 else None
        if aborted is not None:  # it must still be running when it is aborted
            params |= {"max_tokens": 110, "ignore_eos": True, "stop_token_ids": []}
        arrivals.append(Arrival(f"mixed {number}", prompt, params, step, aborted))
    return arrivals


def start(model: Path, name: str) -> Any:
    """Start an engine on a model of its own."""
    fields = {}
    if name.startswith("mrope"):
        fields = mrope.CONFIG
        mrope.register()
    small = kinds.SMALL if torch.cuda.is_available() else {}
    return build_engine(
        generate(model.with_name(f"model {name}"), **fields),
        dtype=DTYPE,
        max_model_len=512,
        max_num_seqs=kinds.REQUESTS,
        max_num_batched_tokens=kinds.BUDGET,
        block_size=16,
        max_logprobs=-1,
        enable_prefix_caching=True,
        reasoning_config=thinking.config(),
        **{"enforce_eager": False, **small, **ENGINES[name]},
    )


def shrink(engine: Any, left: int) -> None:
    """Leave so many blocks of the KV cache, all of them empty."""
    scheduler = engine.engine_core.engine_core.scheduler
    engine.reset_prefix_cache()
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - left)


def serve(engine: Any, drafts: bool, report: dict[str, Any]) -> None:
    """Run all requests, and report them as they end."""
    steps = wave = 0
    while steps < STEPS:
        done = kinds.run(engine, steady(wave))
        report["batches"][f"steady {wave}"] = done
        steps, wave = steps + done["steps"], wave + 1
    shrink(engine, BLOCKS[drafts])
    grammars = parity.install(engine)
    stats = ScheduleStats(engine)
    report["batches"]["mixed"] = kinds.run(engine, requests(drafts, grammars))
    report["stats"] = {**stats.to_json(), "grammars": grammars}


def main(model: Path, out: Path, name: str, seed: str | None = None) -> None:
    """Run every batch, and write the report, also if the engine fails."""
    guard_log, watch = kinds.GuardLog(), kinds.Watch()
    here = torch.cuda.is_available()  # else the worker is another process, and not watched
    if here:
        watch.install()
    if here and os.environ.get(kinds.GUARD):
        waits.warn_of_missed()
    delays = kinds.delay(int(seed)) if seed is not None else int
    engine = start(model, name)
    report: dict[str, Any] = {"batches": {}, "failed": None, "planted": None}
    try:
        serve(engine, "ngram" in name, report)
    except Exception:
        report["failed"] = traceback.format_exc()[-3000:]
    report |= {"errors": list(watch.errors), "delays": delays()}
    if here and os.environ.get(kinds.GUARD) == "error" and report["failed"] is None:
        kinds.plant()
        try:
            kinds.run(engine, steady(-1))
        except Exception as error:
            report["planted"] = f"{type(error).__name__}: {error}"
    report["reports"] = guard_log.texts
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
