"""What is measured: engine shapes, and the kinds of request that each is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: The case that the other cases of a row are held against.
BASELINE = "none"

_QWEN2: Mapping[str, Any] = {"max_position_embeddings": 32768, "rope_theta": 1e6}
_HALF_B: Mapping[str, Any] = {
    **_QWEN2,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}

_SEVEN_B: Mapping[str, Any] = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Row:
    """One engine, and the cases that it runs one after the other.

    Attributes:
        name: what the command line calls it.
        model: fields of config.json that differ from the demo's model.
        batch: requests, all there before the first step.
        prompt: tokens in each prompt.
        output: tokens that each request generates, whatever they are.
        length: the engine's max_model_len.
        cases: case name to the sampling parameters that make it. Of ``bad_words`` they give
            the length of each, in tokens: the words are what the request gave in the baseline.
        warmup: tokens that each request generates in the warm-up before a case.
        asynchronous: whether the engine schedules asynchronously.
        runner: the version of the model runner.
        beside: case name to the direction of the long copies, "d2h" or "h2d", that run beside
            it on a stream of their own. What such a case gives must be what the case of the
            same parameters gives without them.
        thinking: whether the engine knows the markers of :mod:`bench.thinking`; every prompt
            then ends with the start.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    prompt: int
    output: int
    length: int
    cases: Mapping[str, Mapping[str, Any]]
    warmup: int = 32
    asynchronous: bool = True
    runner: int = 1
    beside: Mapping[str, str] = field(default_factory=dict)
    thinking: bool = False

    def alone(self, case: str) -> str:
        """The case of the same parameters without copies beside it."""
        return next(
            name
            for name, parameters in self.cases.items()
            if name not in self.beside and parameters == self.cases[case]
        )

    def tiny(self) -> Row:
        """The same cases at a size for a CPU, to try the programs and not to measure."""
        return replace(self, model={}, batch=4, prompt=8, output=16, length=256, warmup=4)


ROWS: Mapping[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="half-b",
            model=_HALF_B,
            batch=128,
            prompt=128,
            output=4096,
            length=4352,
            cases={BASELINE: {}, "presence": {"presence_penalty": 1.5}},
        ),
        Row(
            name="seven-b",
            model=_SEVEN_B,
            batch=8,
            prompt=128,
            output=512,
            length=1024,
            cases={
                BASELINE: {},
                "penalties+logprobs": {
                    "presence_penalty": 0.5,
                    "frequency_penalty": 0.3,
                    "repetition_penalty": 1.1,
                    "logprobs": 5,
                },
            },
        ),
        Row(
            name="readback-sync",
            model=_HALF_B,
            batch=128,
            prompt=128,
            output=256,
            length=640,
            cases={
                BASELINE: {},
                "logprobs 0": {"logprobs": 0},
                "logprobs 5": {"logprobs": 5},
                "logprobs 20": {"logprobs": 20},
                "logprobs 5 beside D2H": {"logprobs": 5},
                "logprobs 5 beside H2D": {"logprobs": 5},
            },
            asynchronous=False,
            beside={"logprobs 5 beside D2H": "d2h", "logprobs 5 beside H2D": "h2d"},
        ),
        Row(
            name="readback-async",
            model=_HALF_B,
            batch=128,
            prompt=128,
            output=256,
            length=640,
            cases={
                BASELINE: {},
                "logprobs 5": {"logprobs": 5},
                "logprobs 20": {"logprobs": 20},
                "logprobs 5 beside D2H": {"logprobs": 5},
            },
            beside={"logprobs 5 beside D2H": "d2h"},
        ),
        Row(
            name="thinking",
            model=_HALF_B,
            batch=128,
            prompt=128,
            output=2048,
            length=2304,
            cases={BASELINE: {}, "budget 1500": {"thinking_token_budget": 1500}},
            thinking=True,
        ),
        Row(
            name="thinking-4096",
            model=_HALF_B,
            batch=32,
            prompt=128,
            output=4200,
            length=4352,
            cases={BASELINE: {}, "budget 4096": {"thinking_token_budget": 4096}},
            thinking=True,
        ),
        Row(
            name="bad-words",
            model=_HALF_B,
            batch=128,
            prompt=128,
            output=2048,
            length=2304,
            cases={BASELINE: {}, "5 words": {"bad_words": (3, 2, 1, 2, 1)}},
        ),
        Row(
            name="mrv2",
            model=_SEVEN_B,
            batch=128,
            prompt=128,
            output=256,
            length=512,
            cases={
                BASELINE: {},
                "temperature 1": {"temperature": 1.0, "seed": 1},
            },
            runner=2,
        ),
    )
}
