"""Serve a few mixed requests under compute-sanitizer's memcheck, and what other programs share.

    python kinds.py MODEL_DIR OUT.json LOG

LOG is memcheck's, which watches the overlay's kernels. OUT.json holds the requests' outputs, and
the calls that failed, with their stacks.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import random
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from engine.generate import DTYPE
from support import thinking
from support.checkpoint import VOCABULARY, generate
from support.engine_loop import Arrival, build_engine, run_requests

REQUESTS = 16
TOKENS = 150
#: Longer prompts are prefilled in chunks.
BUDGET = 96
FUNCTIONS = ("execute_model", "sample_tokens", "get_output")
GUARD = "VLLM_READINESS_SYNC_GUARD"
#: Variables of every engine here.
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
#: The overlay's kernels.
KERNELS = (
    *("prepare_kernel", "store_kernel", "rank_kernel", "exponential_kernel", "uniform_kernel"),
    *("build_kernel", "count_kernel", "apply_kernel", "mask_kernel", "append_kernel"),
)
#: No profiling, which other engines on the same device would disturb.
SMALL: dict[str, Any] = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 64 << 20}
#: Approximately, for an H100 at its usual clock.
CYCLES_A_MS = 1_750_000

#: With weights that vLLM draws itself, each token depends on the one before it: outputs become
#: periodic, and drafts are accepted.
_CIRCLES = {"enforce_eager": True, "load_format": "dummy"}
_DRAFTS = {"num_speculative_tokens": 3, "prompt_lookup_max": 3}
_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [REQUESTS],
}

#: Arguments of each engine.
ENGINES: dict[str, dict[str, Any]] = {
    "sync": {"async_scheduling": False, "compilation_config": _GRAPHS},
    "async": {"async_scheduling": True, "compilation_config": _GRAPHS},
    "ngram": {
        "async_scheduling": False,
        **_CIRCLES,
        "speculative_config": {"method": "ngram", **_DRAFTS},
    },
    "ngram_gpu": {
        "async_scheduling": True,
        **_CIRCLES,
        "speculative_config": {"method": "ngram_gpu", **_DRAFTS},
    },
}

_DRAWN = [
    {"temperature": 0.9, "seed": 1},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 2},
]
_PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.6},
    {"repetition_penalty": 1.3},
    {"presence_penalty": -0.4, "frequency_penalty": 0.7, "repetition_penalty": 0.8},
]
#: As token ids: almost no token may follow itself.
_WORDS = [[token, token] for token in range(VOCABULARY - 5)] + [[4, 5, 6], [7]]
_BAD_WORDS: list[dict[str, Any]] = [
    {"bad_words": _WORDS},
    {"bad_words": [[token] for token in range(0, VOCABULARY, 5)], **_PENALTIES[3]},
    {"bad_words": [_WORDS[number] * 2 for number in range(VOCABULARY - 5)]},
]
_LOGPROBS = [{"logprobs": top} for top in (0, 1, 2, 5, 10, 20)]
_PROMPTS = [{"prompt_logprobs": top} for top in (0, 3, -1)]

#: Settings by kind of output.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, *_DRAWN],
    "penalties": [*_PENALTIES, {}, {**_PENALTIES[3], **_DRAWN[0]}],
    "bad-words": [*_BAD_WORDS, {}, {**_BAD_WORDS[0], **_DRAWN[0]}],
    "logprobs": [*_LOGPROBS, {}, {"logprobs": 3, **_DRAWN[1]}, {"logprobs": 4, **_PENALTIES[3]}],
    "every logprob": [{"logprobs": -1}, {}, {"logprobs": 2}, {"logprobs": -1, **_PENALTIES[0]}],
    "prompts": [*_PROMPTS, {"prompt_logprobs": 2, "logprobs": 1}, {}],
    "mixed": [
        {"prompt_logprobs": 3, "logprobs": 5, **_PENALTIES[3]},
        {"prompt_logprobs": -1, "logprobs": -1},
        {"logprobs": 20, **_PENALTIES[0], **_DRAWN[1], **_BAD_WORDS[0]},
        {},
        {"logprobs": 0},
    ],
}
#: Batches with thinking budgets; an engine that knows the markers keeps more history.
THINKING: dict[str, list[dict[str, Any]]] = {
    "budgets": [
        {"thinking_token_budget": 40},
        {"thinking_token_budget": 5, "logprobs": 2},
        {},
        {"thinking_token_budget": 90, **_DRAWN[0]},
        {"thinking_token_budget": 1},
        {"thinking_token_budget": 400},
        {"thinking_token_budget": 0},
    ],
    "budgets and more": [
        {"thinking_token_budget": 60, **_PENALTIES[3]},
        {"thinking_token_budget": 20, **_BAD_WORDS[0]},
        {"thinking_token_budget": 33, "logprobs": 5, **_DRAWN[1]},
        _PENALTIES[0],
    ],
}


def requests(batch: str, short: bool = False, tokens: int = TOKENS) -> list[Arrival]:
    """Draw a batch's requests, the same ones each time.

    Args:
        batch: its name.
        short: four of 6 tokens each, at once.
        tokens: of each request otherwise.
    """
    chance = random.Random(batch)
    settings = (BATCHES | THINKING)[batch]
    long = batch in ("prompts", "mixed")
    arrivals = []
    for number in range(4 if short else REQUESTS):
        params = {"max_tokens": 6 if short else tokens, "ignore_eos": True}
        params |= settings[number % len(settings)]
        if not torch.cuda.is_available():  # stock's CPU runner fails with chunked prompts
            params.pop("seed", None)
            params.pop("temperature", None)
        # Some are periodic, so that drafts are made from the first step on.
        period = chance.choice([3, 7, 400])
        length = chance.randint(BUDGET + 10, 250) if long else chance.randint(3, 40)
        pool = [chance.randrange(3, VOCABULARY) for _ in range(period)]
        prompt = [pool[place % period] for place in range(length)]
        if "thinking_token_budget" in params:
            prompt += thinking.START + pool[: number % 3]
        arrivals.append(Arrival(f"{batch} {number}", prompt, params, 0 if short else 4 * number))
    return arrivals


class Watch:
    """Keeps the errors of the step's functions, in the process that runs them.

    Attributes:
        errors: by failed call, the function, the error and the stack.
    """

    def __init__(self) -> None:
        self.errors: list[dict[str, str]] = []

    def install(self) -> None:
        """Wrap the functions, before the guard wraps those of each runner."""
        from vllm.v1.worker import gpu_model_runner

        for name in FUNCTIONS:
            runner = gpu_model_runner.GPUModelRunner
            owner = gpu_model_runner.AsyncGPUModelRunnerOutput if name == "get_output" else runner
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                stack = "".join(traceback.format_exc()[-5000:])
                self.errors.append({"function": name, "error": str(error), "stack": stack})
                raise

        return watched


class GuardLog(logging.Handler):
    """The sync guard's reports."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("vllm.v1.readiness.watch.sync_guard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message, unless it only announces the guard."""
        if record.levelno > logging.INFO:
            self.texts.append(record.getMessage())


def delay(seed: int) -> Callable[[], int]:
    """Delay each copy to the host, on its stream.

    Returns: a function that returns the number of delayed copies.
    """
    from vllm.v1.readiness.outputs import readback

    owner: Any = readback.Readbacks
    chance = random.Random(seed)
    copy = owner._copy
    delays = []

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        delays.append(chance.choice([0.0, 0.5, 1.0]) * chance.uniform(0, 40))
        torch.cuda._sleep(int(delays[-1] * CYCLES_A_MS))
        return copy(self, *args, **kwargs)

    owner._copy = late
    return lambda: len(delays)


def plant() -> None:
    """Plant a sync in the sampler."""
    from vllm.v1.sample.sampler import Sampler

    forward = Sampler.forward

    def careless(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.sampled_token_ids[0, 0].item()
        return result

    Sampler.forward = careless


def build(model: Path, budgets: bool, **arguments: Any) -> Any:
    """Start an engine that is fit for :func:`requests`.

    Args:
        model: the checkpoint's directory.
        budgets: whether it knows the markers of thinking.
        arguments: further ones of the engine.
    """
    small = SMALL if torch.cuda.is_available() else {}
    return build_engine(
        generate(model),
        dtype=DTYPE,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=BUDGET,
        max_logprobs=-1,
        reasoning_config=thinking.config() if budgets else None,
        **{**small, **arguments},
    )


def run(engine: Any, batch: Sequence[Arrival]) -> dict[str, Any]:
    """Run requests to their end; the number of steps, and each request's output."""
    outputs, steps = run_requests(engine, batch)
    for output in outputs.values():
        for name in ("logprobs", "prompt_logprobs"):
            output[name] = _digests(output[name])
    return {"steps": steps, "results": outputs}


def _digests(positions: Any) -> list[str] | None:
    """By position, the number of logprobs and a digest of their bits."""
    return positions and [
        top and f"{len(top)} {hashlib.sha256(json.dumps(top).encode()).hexdigest()[:16]}"
        for top in positions
    ]


def main(model: Path, out: Path) -> None:
    """Run the requests, and write the report, also if the engine fails."""
    watch = Watch()
    watch.install()
    engine = build(model, budgets=False, **{**ENGINES["sync"], "enforce_eager": True})
    report: dict[str, Any] = {"results": {}, "failed": None}
    try:
        report |= run(engine, requests("mixed", short=True))
    except Exception:
        report["failed"] = traceback.format_exc()[-3000:]
    out.write_text(json.dumps({**report, "errors": watch.errors}))


if __name__ == "__main__":
    model, out, *log = sys.argv[1:]
    if log:
        tool = ["compute-sanitizer", "--tool", "memcheck", "--log-file", *log]
        # Libraries make calls of the CUDA API that fail, and recover. With other kernels
        # watched as well, an engine takes many minutes to start.
        tool += ["--report-api-errors", "no"]
        for kernel in KERNELS:
            tool += ["--kernel-regex", f"kns={kernel}"]
        os.execvp(tool[0], [*tool, sys.executable, sys.argv[0], model, out])
    main(Path(model), Path(out))
