"""Run every kind of output through the vLLM that Python imports here, and watch its waits.

    python kinds.py MODEL_DIR OUT.json ENGINE [--thinking] [--delay SEED] [--short]
                    [--sanitize LOG]

ENGINE is a name in :data:`ENGINES`. Batches of one kind each are run one after the other,
their requests arriving over many steps; what each position gave is written as a digest, so
that two runs can be compared. Besides, OUT.json tells for every call of the step's
functions how often it waited and in whose name, and which calls failed and where.

With VLLM_READINESS_SYNC_GUARD=error a sync is planted at the end, to show that the guard is
there; with =warn what the guard says is collected. --thinking runs batches with thinking
budgets, on an engine that knows the markers. --delay holds back each readback by up
to 40 ms; --sanitize has compute-sanitizer's memcheck watch the overlay's kernels.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import logging
import os
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
from bench import thinking
from engine.generate import DTYPE, plain
from support.checkpoint import VOCABULARY, generate

REQUESTS = 16
TOKENS = 150
#: Longer prompts are prefilled in chunks.
BUDGET = 96
FUNCTIONS = ("execute_model", "sample_tokens", "get_output")
GUARD = "VLLM_READINESS_SYNC_GUARD"
#: What every engine here is started with.
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
#: The overlay's.
KERNELS = ("store_kernel", "apply_kernel", "count_kernel", "mask_kernel", "append_kernel")
#: Of an H100 at its usual clock, about.
CYCLES_A_MS = 1_750_000

#: Of weights that vLLM draws itself, a token follows from the one before it, so that soon
#: the output goes round in circles, and drafts are right.
_CIRCLES = {"enforce_eager": True, "load_format": "dummy"}
_DRAFTS = {"num_speculative_tokens": 3, "prompt_lookup_max": 3}
_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [REQUESTS],
}

#: What distinguishes the engines.
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
#: As token ids: no token but a few may follow itself, or come in this order.
_WORDS = [[token, token] for token in range(VOCABULARY - 5)] + [[4, 5, 6], [7]]
_BAD_WORDS: list[dict[str, Any]] = [
    {"bad_words": _WORDS},
    {"bad_words": [[token] for token in range(0, VOCABULARY, 5)], **_PENALTIES[3]},
    {"bad_words": [_WORDS[number] * 2 for number in range(VOCABULARY - 5)]},
]
_LOGPROBS = [{"logprobs": top} for top in (0, 1, 2, 5, 10, 20)]
_PROMPTS = [{"prompt_logprobs": top} for top in (0, 3, -1)]

#: By the kind of output that a batch is about.
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


@dataclass(frozen=True)
class Request:
    """A request, and the step before which it arrives."""

    name: str
    prompt: list[int]
    parameters: dict[str, Any]
    arrives: int


def requests(batch: str, short: bool) -> list[Request]:
    """A batch's requests, the same ones each time."""
    chance = random.Random(batch)
    kinds = (BATCHES | THINKING)[batch]
    long = batch in ("prompts", "mixed")
    made = []
    for number in range(4 if short else REQUESTS):
        kind = dict(kinds[number % len(kinds)])
        if not torch.cuda.is_available():
            kind.pop("seed", None)  # stock's CPU runner fails where prompts come in chunks
            kind.pop("temperature", None)
        # Some repeat themselves, so that drafts are made from the beginning.
        period = chance.choice([3, 7, 400])
        length = chance.randint(BUDGET + 10, 250) if long else chance.randint(3, 40)
        pool = [chance.randrange(3, VOCABULARY) for _ in range(period)]
        prompt = [pool[at % period] for at in range(length)]
        if "thinking_token_budget" in kind:
            prompt += thinking.START + pool[: number % 3]
        made.append(
            Request(
                name=f"{batch} {number}",
                prompt=prompt,
                parameters={
                    "temperature": 0.0,
                    "max_tokens": 6 if short else TOKENS,
                    "ignore_eos": True,
                    "detokenize": False,
                    **kind,
                },
                arrives=0 if short else 4 * number,
            )
        )
    return made


class Watch:
    """The step's functions, in the process that runs them.

    Attributes:
        calls: of each, the function, the fences by owner, the waits on events by place
            (those of fences under "fence"), and how many prompts' logprobs it ended.
        errors: of each that failed, the function, the error and the stack.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, int], dict[str, int], int]] = []
        self.errors: list[dict[str, str]] = []
        self.waits: Counter[str] = Counter()

    def install(self) -> None:
        """Wrap the functions. The guard, which wraps each runner's, then comes around this."""
        from vllm.v1.worker import gpu_model_runner

        synchronize = torch.Event.synchronize
        waits = self.waits

        def counted(event: Any) -> None:
            caller = sys._getframe(1)
            file = Path(caller.f_code.co_filename)
            ours = file.parts[-2:] == ("readiness", "fences.py")
            place = f"{file.name}:{caller.f_lineno} {caller.f_code.co_name}"
            waits["fence" if ours else place] += 1
            synchronize(event)

        # torch.Event is a C type whose attributes are fixed: a subclass takes its name.
        torch.Event = type("Event", (torch.Event,), {"synchronize": counted})
        for name in FUNCTIONS:
            runner = gpu_model_runner.GPUModelRunner
            owner = gpu_model_runner.AsyncGPUModelRunnerOutput if name == "get_output" else runner
            setattr(owner, name, self._watched(name, getattr(owner, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            fences, waits = Counter(_fences()), self.waits.copy()
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                stack = "".join(traceback.format_exc()[-5000:])
                self.errors.append({"function": name, "error": str(error), "stack": stack})
                raise
            ended = getattr(result, "prompt_logprobs_dict", None) or {}
            fenced, waited = Counter(_fences()) - fences, self.waits - waits
            self.calls.append((name, dict(fenced), dict(waited), sum(map(bool, ended.values()))))
            return result

        return watched


def _fences() -> dict[str, int]:
    """Fences so far by owner; none where there is no overlay."""
    module = sys.modules.get("vllm.v1.readiness.fences")
    return dict(module.counts()) if module else {}


class Said(logging.Handler):
    """What the sync guard says."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logging.getLogger("vllm.v1.readiness.sync_guard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, unless it says no more than that the guard is there."""
        if record.levelno > logging.INFO:
            self.texts.append(record.getMessage())


def delay(seed: int) -> Callable[[], int]:
    """Hold back each copy to the host, on the stream that it is on; returns their counter."""
    from vllm.v1.readiness import readback

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
    """Have the sampler wait for the device, as somebody's careless line would."""
    from vllm.v1.sample.sampler import Sampler

    forward = Sampler.forward

    def careless(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        result.sampled_token_ids[0, 0].item()
        return result

    Sampler.forward = careless


def start(model: Path, name: str, short: bool, budgets: bool) -> Any:
    """An engine; without graphs if it is for a few steps."""
    from vllm import EngineArgs, LLMEngine

    small: dict[str, Any] = {}
    if torch.cuda.is_available():
        # No profiling, which other engines on the same device would disturb.
        small = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 64 << 20}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(generate(model)),
            skip_tokenizer_init=True,
            dtype=DTYPE,
            max_model_len=512,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=BUDGET,
            max_logprobs=-1,
            reasoning_config=thinking.config() if budgets else None,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
            **{**small, **ENGINES[name], **({"enforce_eager": True} if short else {})},
        )
    )


def run(engine: Any, batch: Sequence[Request]) -> dict[str, Any]:
    """Run requests to their end; what they gave, and the steps that it took."""
    from vllm import SamplingParams, TokensPrompt

    results: dict[str, Any] = {}
    step = 0
    while len(results) < len(batch):
        for request in batch:
            if request.arrives == step:
                prompt = TokensPrompt(prompt_token_ids=request.prompt)
                kind = dict(request.parameters)
                words = kind.pop("bad_words", None)
                params = SamplingParams(**kind)
                # Words are turned to tokens by a tokenizer, and there is none.
                params._bad_words_token_ids = words
                engine.add_request(request.name, prompt, params)
        for output in engine.step():
            if output.finished:
                given = output.outputs[0]
                results[output.request_id] = {
                    "tokens": list(given.token_ids),
                    "finish": given.finish_reason,
                    "logprobs": _digests(given.logprobs),
                    "prompt_logprobs": _digests(output.prompt_logprobs),
                }
        step += 1
    while engine.has_unfinished_requests():
        engine.step()
    return {"steps": step, "results": results}


def _digests(positions: Any) -> list[str] | None:
    """A position's logprobs as a short text that differs if a bit does."""
    listed = plain(positions)
    return listed and [
        at and f"{len(at)} {hashlib.sha256(json.dumps(at).encode()).hexdigest()[:16]}"
        for at in listed
    ]


def main(args: argparse.Namespace) -> None:
    """Run every batch, and write what came out, also if an engine fails on the way."""
    said, watch = Said(), Watch()
    here = torch.cuda.is_available()  # else the worker is another process, and not watched
    if here:
        watch.install()
    delays = delay(args.delay) if args.delay is not None else int
    engine = start(args.model, args.engine, args.short, args.thinking)
    report: dict[str, Any] = {"batches": {}, "failed": None, "planted": None}
    batches = ("mixed",) if args.short else THINKING if args.thinking else BATCHES
    for name in batches:
        try:
            report["batches"][name] = run(engine, requests(name, args.short))
        except Exception:
            report["failed"] = f"{name}: {traceback.format_exc()[-3000:]}"
            break
    report |= {"calls": watch.calls, "errors": list(watch.errors), "delays": delays()}
    if here and os.environ.get(GUARD) == "error" and report["failed"] is None:
        plant()
        try:
            run(engine, requests("plain", short=True))
        except Exception as error:
            report["planted"] = f"{type(error).__name__}: {error}"
    report["said"] = said.texts
    args.out.write_text(json.dumps(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--thinking", action="store_true", help="batches with thinking budgets")
    parser.add_argument("--delay", type=int, help="seed of the delays")
    parser.add_argument("--short", action="store_true", help="four requests, six tokens each")
    parser.add_argument("--sanitize", type=Path, help="run under memcheck; its log")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    if arguments.sanitize:
        at = sys.argv.index("--sanitize")
        tool = ["compute-sanitizer", "--tool", "memcheck", "--log-file", str(arguments.sanitize)]
        # Failed calls of the CUDA API, which libraries try out and recover from, are left
        # out; so are others' kernels, under which an engine does not start within minutes.
        tool += ["--report-api-errors", "no"]
        for kernel in KERNELS:
            tool += ["--kernel-regex", f"kns={kernel}"]
        os.execvp(tool[0], [*tool, sys.executable, *sys.argv[:at], *sys.argv[at + 2 :]])
    main(arguments)
