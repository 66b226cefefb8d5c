"""Engines, and the requests of each row."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import grammars, thinking
from bench.models import HALF_B, HYBRID, SEVEN_B, SMALL

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


class Engine(NamedTuple):
    """An engine, which is started alike on every side.

    Attributes:
        label: its name in reports.
        model: fields of config.json that differ from the demo's model.
        vocabulary: number of its tokens.
        concurrency: numbers of requests in flight that it is measured with.
        rows: names of the rows that are measured by default.
        mrv2: whether Model Runner V2 supports the model.
        graphs: names of the CUDA graphs that it is measured with by default.
        prompt: mean number of prompt tokens.
        output: mean number of output tokens.
        length: max_model_len in tokens.
    """

    label: str
    model: Mapping[str, Any]
    vocabulary: int
    concurrency: tuple[int, ...]
    rows: Sequence[str]
    mrv2: bool = True
    graphs: Sequence[str] = ("piecewise", "full")
    prompt: int = 100
    output: int = 200
    length: int = 4096


class Shape(NamedTuple):
    """A name of :data:`ENGINES`, and the number of requests in flight."""

    engine: str
    concurrency: int


class Row(NamedTuple):
    """Sampling parameters of a row's requests.

    Attributes:
        parameters: sampling parameters, which the asking places of the loop take in turn.
            "seed" True: a seed for each request. "bad_words" True: five words of its own.
            "grammar": the grammar of :mod:`bench.grammars`. A "thinking_token_budget" is a
            fraction of the request's output.
        every: one place in this number of places asks; the others send plain requests.
    """

    parameters: tuple[Mapping[str, Any], ...] = ({},)
    every: int = 1

    @property
    def thinking(self) -> bool:
        """True if the engine needs a reasoning config, which Model Runner V2 refuses."""
        return any("thinking_token_budget" in one for one in self.parameters)


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
    "grammars": Row(({"grammar": True},), every=10),
    "thinking": Row((_BUDGET,)),
    "thinking-presence": Row(({**PRESENCE, **_BUDGET},)),
}


_USUAL = [name for name in ROWS if name != "thinking-presence"]

ENGINES: Mapping[str, Engine] = {
    "half-b": Engine("0.5B", HALF_B, 151936, (128, 32, 256, 8, 1), _USUAL),
    "seven-b": Engine("7B", SEVEN_B, 152064, (64,), _USUAL),
    # Its layers do not compile with torch 2.11.
    "hybrid": Engine(
        *("hybrid", HYBRID, 128256, (64,), ["plain", "thinking-presence"]),
        mrv2=False,
        graphs=["decodes"],
    ),
    "small": Engine("small", SMALL, 32000, (8,), _USUAL, prompt=32, output=32, length=1024),
    "tiny": Engine("tiny", {}, 1024, (4,), _USUAL, prompt=12, output=12, length=256),
}
#: Those of one engine are measured in one start of it.
SHAPES: Mapping[str, Shape] = {
    f"{name}-{concurrency}": Shape(name, concurrency)
    for name, engine in ENGINES.items()
    for concurrency in engine.concurrency
}


class Drawn(NamedTuple):
    """A request as it is drawn, by a seed.

    Attributes:
        chance: draws more of it.
        prompt: its tokens.
        output: number of tokens to generate.
        parameters: sampling parameters, without those that take a tokenizer.
    """

    chance: random.Random
    prompt: list[int]
    output: int
    parameters: dict[str, Any]


def draw(engine: str, row: str, seed: int, place: int, number: int) -> Drawn:
    """Draw a request; equal arguments give equal ones, whatever the speed.

    Args:
        engine: a name of :data:`ENGINES`.
        row: a name of :data:`ROWS`.
        seed: of the lengths and tokens.
        place: the place of the loop that sends it, from 0.
        number: of the request in its place. The first one, 0, is cut at a random length: with all
            places started together, their ends would come together, too. -1 is a short one that
            asks for the same as the place's others.
    """
    shape, kind = ENGINES[engine], ROWS[row]
    chance = random.Random(f"{seed}-{row}-{place}-{number}")  # noqa: S311 (draws no secret)
    length = _length(chance, shape.prompt, shape.length // 4)
    prompt = chance.choices(range(_FIRST, shape.vocabulary), k=length)
    output = _length(chance, shape.output, shape.length // 2)
    if number <= 0:
        output = math.ceil(output * chance.random()) if number == 0 else _WARMUP
    parameters: dict[str, Any] = {"temperature": 1.0}
    if place % kind.every == 0:
        parameters |= kind.parameters[place // kind.every % len(kind.parameters)]
    if parameters.get("seed") is True:
        parameters["seed"] = chance.getrandbits(31)
    return Drawn(chance, prompt, output, parameters)


class Request(NamedTuple):
    """A request, with its id and the place of the loop that sends it."""

    name: str
    place: int
    prompt: TokensPrompt
    sampling: SamplingParams


class Source:
    """The requests of a slice.

    Args:
        shape: the engine and the concurrency.
        row: a name of :data:`ROWS`.
        seed: of the lengths and tokens.
    """

    def __init__(self, shape: Shape, row: str, seed: int) -> None:
        self.concurrency = shape.concurrency
        self._drawn_by = (shape.engine, row, seed)
        self._sent: Counter[int] = Counter()

    def warmup(self, place: int) -> Request:
        """Return a short request that asks for the same as the place's others."""
        return self._request(place, -1)

    def following(self, place: int) -> Request:
        """Return the next request of a place."""
        self._sent[place] += 1
        return self._request(place, self._sent[place] - 1)

    def _request(self, place: int, number: int) -> Request:
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        engine, row, seed = self._drawn_by
        chance, prompt, output, parameters = draw(engine, row, seed, place, number)
        if parameters.pop("grammar", False):
            parameters["structured_outputs"] = grammars.params()
        if "thinking_token_budget" in parameters:
            share = parameters["thinking_token_budget"]
            parameters["thinking_token_budget"] = math.ceil(output * share)
            prompt[-len(thinking.START) :] = thinking.START
        bad_words = parameters.pop("bad_words", False)
        sampling = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **parameters,
        )
        if bad_words:
            # vLLM makes tokens of words by a tokenizer, and there is none.
            tokens = range(_FIRST, ENGINES[engine].vocabulary)
            sampling._bad_words_token_ids = [chance.choices(tokens, k=size) for size in _BAD_WORDS]
        name = f"{seed}-{row}-{self.concurrency}-{place}-{number}"
        return Request(name, place, TokensPrompt(prompt_token_ids=prompt), sampling)


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
