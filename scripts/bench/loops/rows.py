"""Engines, and the requests of each row."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from demo import model

from bench.models import HALF_B, HYBRID, NEXT, QWEN3_8B, SEVEN_B, SMALL

if TYPE_CHECKING:
    from vllm import SamplingParams, TokensPrompt

#: Standard deviation of the logarithms of the lengths.
_SPREAD = 0.6
#: The first token id in prompts and bad words.
_FIRST = 9
#: Tokens of each bad word.
_BAD_WORDS = (3, 2, 1, 2, 1)
#: Tokens that a warm-up request generates.
_WARMUP = 4
#: Text and tokens of the markers of thinking.
MARKERS, _START = ("t5 t6", "t7 t8"), [5, 6]
#: All words of the generated model but one, for as long as tokens are asked for.
_GRAMMAR = 'root ::= "t" [1-9] [0-9]* root'


class Engine(NamedTuple):
    """An engine, which is started alike on every side.

    Attributes:
        label: its name in reports.
        model: fields of config.json that differ from the demo's model.
        concurrency: numbers of requests in flight that it is measured with.
        rows: names of the rows that are measured by default.
        mrv2: whether Model Runner V2 supports the model.
        graphs: names of the CUDA graphs that it is measured with by default.
        settings: vLLM's arguments for the model.
        prompt: mean number of prompt tokens.
        output: mean number of output tokens.
        length: max_model_len in tokens.
    """

    label: str
    model: Mapping[str, Any]
    concurrency: tuple[int, ...]
    rows: Sequence[str]
    mrv2: bool = True
    graphs: Sequence[str] = ("piecewise", "full")
    settings: Mapping[str, Any] = MappingProxyType({})
    prompt: int = 100
    output: int = 200
    length: int = 4096

    @property
    def vocabulary(self) -> int:
        """Number of the model's tokens; the text of token 17 is "t17"."""
        return int({**model.CONFIG, **self.model}["vocab_size"])


class Shape(NamedTuple):
    """A name of :data:`ENGINES`, and the number of requests in flight."""

    engine: str
    concurrency: int


class Row(NamedTuple):
    """Sampling parameters of a row's requests.

    Attributes:
        parameters: sampling parameters, which the asking places of the loop take in turn.
            "seed" True: a seed for each request. "bad_words" True: five words of its own.
            A "thinking_token_budget" is a fraction of the request's output.
        every: one place in this number of places asks; the others send plain requests.
    """

    parameters: tuple[Mapping[str, Any], ...] = ({},)
    every: int = 1

    @property
    def thinking(self) -> bool:
        """True if the engine needs a reasoning config, which Model Runner V2 refuses."""
        return any("thinking_token_budget" in one for one in self.parameters)

    @property
    def takes_drafts(self) -> bool:
        """True if vLLM serves these requests with drafts; it refuses min_p."""
        return not any("min_p" in one for one in self.parameters)


_BUDGET = {"thinking_token_budget": 0.5}
PRESENCE = {"presence_penalty": 1.5}
MIXED: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0, "presence_penalty": 0.5, "logprobs": 5},
    {"temperature": 0.8, "top_p": 0.95, "seed": 1, "frequency_penalty": 0.3, "logprobs": 5},
    {"temperature": 1.0, "top_k": 50, "seed": 2, "repetition_penalty": 1.1, "logprobs": 5},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3, "logprobs": 5},
)
#: In the order of measurement. Requests sample with temperature 1, unless a row says otherwise.
ROWS: Mapping[str, Row] = {
    "plain": Row(),
    "mixed": Row(MIXED),
    "one-presence": Row((PRESENCE,), every=sys.maxsize),
    "presence": Row((PRESENCE,)),
    "seeded": Row(({"seed": True},)),
    "logprobs": Row(({"logprobs": 5},)),
    "greedy": Row(({"temperature": 0.0},)),
    "bad-words": Row(({"bad_words": True},)),
    "grammars": Row(({"structured_outputs": {"grammar": _GRAMMAR}},), every=10),
    "thinking": Row((_BUDGET,)),
    "thinking-presence": Row(({**PRESENCE, **_BUDGET},)),
}


_USUAL = [name for name in ROWS if name != "thinking-presence"]
#: Stock needs pinned memory for thinking budgets.
_ON_A_CPU = [name for name in _USUAL if name != "thinking"]

ENGINES: Mapping[str, Engine] = {
    "half-b": Engine("0.5B", HALF_B, (128, 32, 256, 8, 1), _USUAL),
    "seven-b": Engine("7B", SEVEN_B, (64,), _USUAL),
    "qwen3-8b": Engine("Qwen3-8B", QWEN3_8B, (64,), _USUAL),
    "hybrid": Engine(
        *("hybrid", HYBRID, (64,), ["plain", "thinking-presence"]),
        mrv2=False,
        graphs=["piecewise"],
    ),
    "next": Engine(
        *("Qwen3-Next", NEXT, (64,), ["plain", "thinking-presence"]),
        mrv2=False,
        graphs=["piecewise"],
        # Otherwise on Hopper FlashInfer, which compiles its kernels for minutes.
        settings={"gdn_prefill_backend": "triton"},
    ),
    "small": Engine("small", SMALL, (8,), _ON_A_CPU, prompt=32, output=32, length=1024),
    "tiny": Engine("tiny", {}, (4,), _ON_A_CPU, prompt=12, output=12, length=256),
}
#: Those of one engine are measured in one start of it.
SHAPES: Mapping[str, Shape] = {
    f"{name}-{concurrency}": Shape(name, concurrency)
    for name, engine in ENGINES.items()
    for concurrency in engine.concurrency
}


def draw(
    engine: str, row: str, seed: int, place: int, number: int
) -> tuple[list[int], int, dict[str, Any]]:
    """Draw a request; equal arguments give equal ones, whatever the speed.

    Args:
        engine: a name of :data:`ENGINES`.
        row: a name of :data:`ROWS`.
        seed: of the lengths and tokens.
        place: the place of the loop that sends it, from 0.
        number: of the request in its place. The first one, 0, is cut at a random length: with all
            places started together, their ends would come together, too. -1 is a short one that
            asks for the same as the place's others.

    Returns:
        The tokens of the prompt, the number of tokens to generate, and sampling parameters as a
        chat completion has them.
    """
    shape, kind = ENGINES[engine], ROWS[row]
    chance = random.Random(f"{seed}-{row}-{place}-{number}")  # noqa: S311 (draws no secret)
    tokens = range(_FIRST, shape.vocabulary)
    prompt = chance.choices(tokens, k=_length(chance, shape.prompt, shape.length // 4))
    output = _length(chance, shape.output, shape.length // 2)
    if number <= 0:
        output = math.ceil(output * chance.random()) if number == 0 else _WARMUP
    parameters: dict[str, Any] = {"temperature": 1.0}
    if place % kind.every == 0:
        parameters |= kind.parameters[place // kind.every % len(kind.parameters)]
    if parameters.get("seed") is True:
        parameters["seed"] = chance.getrandbits(31)
    if "bad_words" in parameters:
        words = (chance.choices(tokens, k=size) for size in _BAD_WORDS)
        parameters["bad_words"] = [" ".join(f"t{token}" for token in word) for word in words]
    if share := parameters.get("thinking_token_budget"):
        parameters["thinking_token_budget"] = math.ceil(output * share)
        prompt[-len(_START) :] = _START
    return prompt, output, parameters


class Request(NamedTuple):
    """A request, with its id, the place of the loop that sends it, and its number there."""

    name: str
    place: int
    number: int
    prompt: TokensPrompt
    sampling: SamplingParams


def request(case: tuple[str, str], seed: int, place: int, number: int) -> Request:
    """Return a request for the engine's API.

    Args:
        case: names of :data:`SHAPES` and :data:`ROWS`.
        seed: see :func:`draw`, as for the others.
        place: of the loop.
        number: of the request in its place.
    """
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    shape, row = case
    prompt, output, parameters = draw(SHAPES[shape].engine, row, seed, place, number)
    if grammar := parameters.get("structured_outputs"):
        parameters["structured_outputs"] = StructuredOutputsParams(**grammar)
    sampling = SamplingParams(
        max_tokens=output,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **parameters,
    )
    name = f"{seed}-{row}-{shape}-{place}-{number}"
    return Request(name, place, number, TokensPrompt(prompt_token_ids=prompt), sampling)


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile in ms; none without values."""
    ordered = sorted(seconds)
    return {
        f"{name} {label}": ordered[int(len(ordered) * share)] * 1e3
        for label, share in (("p50", 0.5), ("p99", 0.99))
        if ordered
    }


def _length(chance: random.Random, mean: int, longest: int) -> int:
    """Draw a log-normal length of at least 1 token."""
    value = chance.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)
    return min(longest, math.ceil(value))
