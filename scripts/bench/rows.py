"""What is measured: engines, and the rows of requests that each is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: The case that the other cases of a row are held against, where a row has it.
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

#: For a CPU: a step takes some tens of milliseconds, of which sampling is a fair part.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Engine:
    """One engine, as every side starts it.

    Attributes:
        name: what the report calls it.
        model: fields of config.json that differ from the demo's model.
        batch: requests at a time.
        prompt: tokens in each prompt.
        length: the engine's max_model_len.
        asynchronous: whether it schedules asynchronously.
        runner: the version of the model runner, for stock and overlaid.
        thinking: whether the engine knows the markers of :mod:`bench.thinking`; every prompt
            then ends with the start.
        mrv2: whether stock's Model Runner V2 can serve it too, as a side of its own.
    """

    name: str
    model: Mapping[str, Any]
    batch: int
    prompt: int
    length: int
    asynchronous: bool = True
    runner: int = 1
    thinking: bool = False
    mrv2: bool = False

    def sides(self, gpu: bool) -> tuple[str, ...]:
        """What can be measured of it here."""
        return ("stock", "overlaid", *(("mrv2",) if self.mrv2 and gpu else ()))


@dataclass(frozen=True)
class Case:
    """One batch of requests.

    Attributes:
        parameters: of sampling; the requests take them in turn. Of ``bad_words`` they give
            the length of each, in tokens: the words are what the request gave in the
            baseline. A ``thinking_token_budget`` below 1 is that part of the output.
        batch: how many requests, all there before the first step; None: the engine's batch.
        streamed: whether each token is handed out as it comes.
        consumed: whether each step's output is waited for as soon as it is made: the control
            that has to bring the wait back to where it was.
        beside: "d2h" or "h2d": long copies of that direction run beside it on a stream of
            their own. What such a case gives must be what the case of the same parameters
            gives without them.
    """

    parameters: tuple[Mapping[str, Any], ...] = ({},)
    batch: int | None = None
    streamed: bool = False
    consumed: bool = False
    beside: str | None = None

    def of(self, request: int) -> Mapping[str, Any]:
        """The parameters of one request."""
        return self.parameters[request % len(self.parameters)]

    def asks_for(self, name: str) -> bool:
        """Whether any request has that parameter."""
        return any(name in each for each in self.parameters)


@dataclass(frozen=True)
class Row:
    """Cases that one engine runs one after the other.

    Attributes:
        name: what the command line calls it.
        title: one sentence on what it shows.
        source: whose measurement it takes up.
        engine: what it runs on.
        output: tokens that each request generates, whatever they are.
        cases: by name, in their order.
        warmup: tokens that each request generates in the warm-up before a case.
        without: the title where there is no GPU, and therefore less to show.
    """

    name: str
    title: str
    source: str
    engine: Engine
    output: int
    cases: Mapping[str, Case] = field(hash=False)
    warmup: int = 32
    without: str | None = None

    def alone(self, name: str) -> str:
        """The case of the same parameters without copies beside it."""
        case = self.cases[name]
        return next(
            other
            for other, each in self.cases.items()
            if each.beside is None and each.parameters == case.parameters
        )

    def budget(self, parameters: Mapping[str, Any]) -> int | None:
        """The thinking budget in tokens, if there is one."""
        budget = parameters.get("thinking_token_budget")
        return budget if budget is None or budget >= 1 else int(self.output * budget)

    def small(self) -> Row:
        """The row at a size for a CPU.

        Without what a CPU has not: copies beside the steps, and asynchronous scheduling.
        Engines that differ in nothing else become one, which knows the markers of thinking.
        """
        engine = Engine(
            *("small", _SMALL), batch=8, prompt=16, length=1024, asynchronous=False, thinking=True
        )
        cases = {}
        for name, case in self.cases.items():
            if not case.beside and not case.consumed:
                batch = case.batch and max(2, case.batch // 4)
                before, after = case.batch or self.engine.batch, batch or engine.batch
                called = name.replace(f"batch {before}", f"batch {after}")
                cases[called] = replace(case, batch=batch)
        return replace(
            self,
            engine=engine,
            title=self.without or self.title,
            output=min(max(self.output // 16, 32), 64),
            cases=cases,
            warmup=2,
        )

    def tiny(self) -> Row:
        """The row at a size that is there to try the programs, and not to measure."""
        small = self.small()
        return replace(small, engine=replace(small.engine, model={}, length=256), output=16)


HALF_B = Engine("half-b", _HALF_B, batch=128, prompt=128, length=4352, mrv2=True)
HALF_B_SYNC = Engine("half-b sync", _HALF_B, 128, 128, 4352, asynchronous=False)
HALF_B_THINKING = Engine("half-b thinking", _HALF_B, 128, 128, 4352, thinking=True)
SEVEN_B = Engine("seven-b", _SEVEN_B, batch=32, prompt=128, length=1024, mrv2=True)
SEVEN_B_V2 = Engine("seven-b on V2", _SEVEN_B, batch=128, prompt=128, length=512, runner=2)

_PENALISED = (
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.95, "seed": 1, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 50, "seed": 2, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3},
)
_HISTORY = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_WITHOUT_HISTORY = tuple(
    {name: value for name, value in each.items() if name not in _HISTORY} for each in _PENALISED
)


def _logprobs(
    parameters: Iterable[Mapping[str, Any]], top: int = 5
) -> tuple[Mapping[str, Any], ...]:
    return tuple({**each, "logprobs": top} for each in parameters)


_MIXED = _logprobs(_PENALISED)

ROWS: Mapping[str, Row] = {
    row.name: row
    for row in (
        Row(
            name="issue-43450",
            title="Does the wait leave the step, or only sample_tokens?",
            source="vLLM issue 43450",
            engine=SEVEN_B,
            output=128,
            cases={
                BASELINE: Case(),
                "mixed, batch 8": Case(_MIXED, batch=8),
                "mixed, batch 32": Case(_MIXED),
                "mixed, streamed": Case(_MIXED, streamed=True),
                "mixed, no history": Case(_logprobs(_WITHOUT_HISTORY)),
                "mixed, no logprobs": Case(_PENALISED),
                "mixed, consumed at once": Case(_MIXED, consumed=True),
                "greedy, penalties, logprobs": Case(
                    (
                        {
                            "presence_penalty": 0.5,
                            "frequency_penalty": 0.3,
                            "repetition_penalty": 1.1,
                            "logprobs": 5,
                        },
                    )
                ),
            },
        ),
        Row(
            name="prime-rl-2772",
            title="A presence penalty on long outputs.",
            source="prime-rl pull request 2772",
            engine=HALF_B,
            output=2048,
            cases={BASELINE: Case(), "presence 1.5": Case(({"presence_penalty": 1.5},))},
        ),
        Row(
            name="prime-rl-2772-thinking",
            title="A presence penalty on long outputs, with a thinking budget.",
            source="prime-rl pull request 2772",
            engine=HALF_B_THINKING,
            output=2048,
            cases={
                BASELINE: Case(),
                "presence 1.5, budget": Case(
                    ({"presence_penalty": 1.5, "thinking_token_budget": 0.75},)
                ),
            },
        ),
        Row(
            name="pull-22760",
            title="Synchronous scheduling, alone and beside a foreign stream's copies.",
            without="Logprobs.",
            source="vLLM pull request 22760",
            engine=HALF_B_SYNC,
            output=768,
            cases={
                BASELINE: Case(),
                "logprobs 5": Case(_logprobs([{}])),
                "logprobs 20": Case(_logprobs([{}], 20)),
                "logprobs 5 beside D2H": Case(_logprobs([{}]), beside="d2h"),
            },
        ),
        Row(
            name="pull-23569",
            title="Asynchronous scheduling, alone and beside a foreign stream's copies.",
            without="Logprobs and bad words.",
            source="vLLM pull request 23569",
            engine=HALF_B,
            output=768,
            cases={
                BASELINE: Case(),
                "logprobs 5": Case(_logprobs([{}])),
                "logprobs 5 beside D2H": Case(_logprobs([{}]), beside="d2h"),
                "5 bad words": Case(({"bad_words": (3, 2, 1, 2, 1)},)),
            },
        ),
        Row(
            name="pull-35214",
            title="Model Runner V2's sampler, stock and overlaid.",
            source="vLLM pull request 35214",
            engine=SEVEN_B_V2,
            output=256,
            cases={BASELINE: Case(), "temperature 1": Case(({"temperature": 1.0, "seed": 1},))},
        ),
        Row(
            name="half-b-4096",
            title="How a step's time grows with the output.",
            source="the overlay's own",
            engine=HALF_B,
            output=4096,
            cases={BASELINE: Case(), "presence 1.5": Case(({"presence_penalty": 1.5},))},
        ),
    )
}

#: What is measured if nothing is named.
DEFAULT = tuple(name for name in ROWS if name != "half-b-4096")
