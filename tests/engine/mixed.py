"""Run a hundred mixed requests through a real engine, step by step.

    python mixed.py MODEL_DIR OUT.json sync|async [LOGITS_PROCESSOR]

They arrive over many steps, some are aborted, prompts are prefilled in chunks, and the KV cache
is too small for all of them, so that requests are preempted and resumed. All are greedy: a
request's output must not depend on the schedule. Writes each request's output, and the engine's
statistics.
"""

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import thinking
from engine.generate import logprob_lists
from support.checkpoint import VOCABULARY, generate
from support.engine_stats import EngineStats
from support.params import sampling_params

REQUESTS = 100
BLOCK = 32

#: A token in thirteen: many requests give one.
STOPS = list(range(7, VOCABULARY, 13))
#: No token twice in a row.
STUTTERS = [[token, token] for token in range(VOCABULARY)]

#: Kinds of requests. min_tokens occurs only with penalties: without them, stock truncates the
#: request's history under async scheduling when a penalised request joins.
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 5, "ignore_eos": True},
    {"presence_penalty": 1.8, "logprobs": 1},
    {"presence_penalty": -1.5, "logprobs": 1},
    {"frequency_penalty": 1.2, "stop_token_ids": STOPS},
    {"frequency_penalty": -0.9, "logprobs": 0},
    {"repetition_penalty": 1.6, "logprobs": 5},
    {"repetition_penalty": 0.6, "ignore_eos": True},
    {"presence_penalty": -0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 1},
    {"repetition_penalty": 0.7, "min_tokens": 12, "stop_token_ids": STOPS, "logprobs": 1},
    {"presence_penalty": 2.0, "min_tokens": 25, "stop_token_ids": STOPS},
    {"logit_bias": {11: 9.0, 13: -9.0, 700: 7.5}, "logprobs": 5},
    {"stop_token_ids": STOPS},
    {"bad_words": [[token] for token in range(0, VOCABULARY, 5)], "logprobs": 1},
    {"bad_words": STUTTERS, "repetition_penalty": 0.5, "logprobs": 1},
    {"bad_words": STUTTERS, "logit_bias": {17: 30.0, 19: 29.0}},
    {"thinking_token_budget": 5, "logprobs": 1},
    {"thinking_token_budget": 0, "ignore_eos": True},
    {"thinking_token_budget": 18, "repetition_penalty": 0.7, "ignore_eos": True},
    {"thinking_token_budget": 500, "stop_token_ids": STOPS},
]


@dataclass(frozen=True)
class Case:
    """A request, the step before which it arrives, and the one before which it is aborted."""

    name: str
    kind: int
    prompt: list[int]
    length: int
    arrives: int
    leaves: int | None

    def parameters(self) -> Any:
        """The request's SamplingParams."""
        kind = KINDS[self.kind]
        if self.leaves is not None:
            # It must still be running when it is aborted.
            kind = {**kind, "ignore_eos": True, "stop_token_ids": []}
        return sampling_params(max_tokens=self.length, **kind)


def cases() -> list[Case]:
    """The requests, the same ones each time."""
    chance = random.Random(20)
    requests = []
    for number in range(REQUESTS):
        arrives = number * 3 // 2
        kind = number % len(KINDS)
        least = KINDS[kind].get("min_tokens", 8)
        thinks = thinking.START if "thinking_token_budget" in KINDS[kind] else []
        leaves = arrives + chance.choice([0, 1, 2, 5, 12, 25]) if number % 8 == 5 else None
        requests.append(
            Case(
                name=f"request-{number}",
                kind=kind,
                prompt=chance.choices(
                    range(3, VOCABULARY), k=chance.choice([4, 9, 20, 33, 70, 120])
                )
                + thinks,
                length=60 if leaves is not None else chance.randint(least, 60),
                arrives=arrives,
                leaves=leaves,
            )
        )
    return requests


def start(model: Path, asynchronous: bool, blocks: int, budget: int = 48, **named: Any) -> Any:
    """Start a small engine that prefills in chunks.

    Args:
        model: the checkpoint's directory.
        asynchronous: whether it schedules asynchronously.
        blocks: of KV cache.
        budget: the most tokens of a step.
        named: further arguments of the engine.
    """
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(generate(model)),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=16,
            max_num_batched_tokens=budget,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=False,
            enforce_eager=True,
            async_scheduling=asynchronous,
            disable_log_stats=True,
            seed=0,
            **named,
        )
    )


def main(model: Path, out: Path, mode: str, processors: list[str]) -> None:
    """Run every request to its end, and write the outputs."""
    from vllm import TokensPrompt

    engine = start(
        model,
        mode == "async",
        blocks=36,
        logits_processors=processors or None,
        reasoning_config=thinking.config(),
    )
    stats = EngineStats(engine)
    requests = cases()
    waiting = {case.name for case in requests if case.leaves is None}
    results: dict[str, Any] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        for case in requests:
            if case.arrives == step:
                prompt = TokensPrompt(prompt_token_ids=case.prompt)
                engine.add_request(case.name, prompt, case.parameters())
        engine.abort_request([case.name for case in requests if case.leaves == step])
        for result in engine.step():
            if result.finished:
                results[result.request_id] = _output(result.outputs[0])
                waiting.discard(result.request_id)
        step += 1
    report = {
        "results": {case.name: results[case.name] for case in requests if case.leaves is None},
        "aborted": [case.name for case in requests if case.name not in results],
        "stats": stats.to_json(),
    }
    out.write_text(json.dumps(report))


def _output(output: Any) -> dict[str, Any]:
    return {
        "tokens": list(output.token_ids),
        "finish": output.finish_reason,
        "stop": output.stop_reason,
        "logprobs": logprob_lists(output.logprobs),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
