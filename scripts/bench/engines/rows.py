"""The engines that are measured, and the rows of requests that each is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

#: The case without sampling parameters, which the other cases of a row are compared with.
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
#: Of a Bamba: attention in every sixth layer, Mamba 2 in the others.
_BAMBA: Mapping[str, Any] = {
    "architectures": ["BambaForCausalLM"],
    "model_type": "bamba",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "attn_layer_indices": [5, 11, 17, 23],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "vocab_size": 128256,
}
#: For a CPU: a step takes tens of milliseconds, and sampling is a fair part of it.
SMALL: Mapping[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Engine:
    """One engine, started alike on every side.

    Attributes:
        name: for the report.
        model: fields of config.json that differ from the demo's model.
        batch: requests at a time.
        prompt: tokens of each prompt.
        length: max_model_len in tokens.
        asynchronous: whether it schedules asynchronously.
        runner: version of the model runner, for stock and overlaid.
        thinking: whether it knows the markers of :mod:`bench.thinking`; every prompt then ends
            with the start marker.
        mrv2: whether stock's Model Runner V2 is a side of its own.
        tensor_parallel: number of GPUs that share each layer; each has a rank of its own.
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
    tensor_parallel: int = 1

    def sides(self, gpu: bool) -> tuple[str, ...]:
        """Return the sides that can be measured on this kind of device."""
        return ("stock", "overlaid", *(("mrv2",) if self.mrv2 and gpu else ()))


@dataclass(frozen=True)
class Case:
    """One batch of requests.

    Attributes:
        parameters: sampling parameters, which the requests take in turn. ``bad_words`` holds the
            length of each word in tokens; the words are what the request returned in the
            baseline. A ``thinking_token_budget`` below 1 is a fraction of the output.
            ``grammar`` asks for the grammar of :mod:`bench.grammars`.
        batch: number of requests, all added before the first step; None: the engine's batch.
        streamed: whether each token is handed out as it comes.
        consumed: whether each step's output is waited for as soon as it exists: the control, in
            which the wait must be back in ``sample_tokens``.
        beside: whether long copies from the device run beside the case. Its outputs must be
            those of the same prompts without copies.
    """

    parameters: tuple[Mapping[str, Any], ...] = ({},)
    batch: int | None = None
    streamed: bool = False
    consumed: bool = False
    beside: bool = False

    def parameters_of(self, request: int) -> Mapping[str, Any]:
        """Return the sampling parameters of one request."""
        return self.parameters[request % len(self.parameters)]

    def asks_for(self, name: str) -> bool:
        """Return whether any request has that parameter."""
        return any(name in parameters for parameters in self.parameters)


#: Tokens that each request generates at least where a row is measured and not tried: outputs that
#: differ only after the hundredth token must be seen to.
REACH = 128
#: Slices of a case.
_SLICES = 16


@dataclass(frozen=True)
class Row:
    """Cases that one engine runs one after the other.

    Attributes:
        name: for the command line.
        title: a sentence that says what the row shows.
        source: the measurement that it repeats.
        engine: the engine that it needs.
        output: tokens that each request generates.
        cases: by name, the baseline first.
        warmup: tokens that each request generates in the warm-up before a case.
        title_on_cpu: the title where there is no GPU, and less to show.
    """

    name: str
    title: str
    source: str
    engine: Engine
    output: int
    cases: Mapping[str, Case] = field(hash=False)
    warmup: int = 32
    title_on_cpu: str | None = None

    @property
    def slice(self) -> int:
        """Steps that a kept engine takes before another takes as many."""
        return max(4, self.output // _SLICES)

    def budget(self, parameters: Mapping[str, Any]) -> int | None:
        """Return the thinking budget in tokens; None if there is none."""
        budget = parameters.get("thinking_token_budget")
        return budget if budget is None or budget >= 1 else int(self.output * budget)

    def sized(self, size: str, output: int | None = None) -> Row:
        """Return the row at a size.

        Args:
            size: "full"; "small" for a CPU, which has no copies beside the steps and no
                asynchronous scheduling; "tiny" to try the programs, and not to measure. At the
                latter two, all engines are one, which knows the markers of thinking.
            output: tokens that each request generates; None for the size's own.
        """
        if size == "full":
            return replace(self, output=output or self.output)
        model, length = (SMALL, 1024) if size == "small" else ({}, 256)
        engine = Engine("small", model, 8, 16, length, asynchronous=False, thinking=True)
        cases = {}
        for name, case in self.cases.items():
            if not case.beside and not case.consumed:
                batch = case.batch and max(2, case.batch // 4)
                before, after = case.batch or self.engine.batch, batch or engine.batch
                renamed = name.replace(f"batch {before}", f"batch {after}")
                cases[renamed] = replace(case, batch=batch)
        default = max(self.output // 16, REACH) if size == "small" else 16
        return replace(
            self,
            engine=engine,
            title=self.title_on_cpu or self.title,
            output=output or default,
            cases=cases,
            warmup=2,
        )


HALF_B = Engine("half-b", _HALF_B, batch=128, prompt=128, length=4352, mrv2=True)
HALF_B_SYNC = Engine("half-b sync", _HALF_B, 128, 128, 4352, asynchronous=False)
HALF_B_STRUCTURED = replace(HALF_B, name="half-b structured")
HALF_B_STRUCTURED_SYNC = replace(HALF_B_SYNC, name="half-b structured sync")
HALF_B_THINKING = Engine("half-b thinking", _HALF_B, 128, 128, 4352, thinking=True)
HALF_B_TP2 = replace(HALF_B_THINKING, name="half-b TP=2", tensor_parallel=2)
SEVEN_B = Engine("seven-b", _SEVEN_B, batch=32, prompt=128, length=1024, mrv2=True)
#: Model Runner V2 has no hybrid models.
HYBRID = Engine("hybrid", _BAMBA, batch=64, prompt=128, length=1024)
SEVEN_B_V2 = Engine("seven-b on V2", _SEVEN_B, batch=128, prompt=128, length=512, runner=2)

_PENALISED = (
    {"temperature": 0.0, "presence_penalty": 0.5},
    {"temperature": 0.8, "top_p": 0.95, "seed": 1, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 50, "seed": 2, "repetition_penalty": 1.1},
    {"temperature": 0.7, "min_p": 0.05, "seed": 3},
)
_HISTORY = ("presence_penalty", "frequency_penalty", "repetition_penalty")
_WITHOUT_HISTORY = tuple(
    {name: value for name, value in parameters.items() if name not in _HISTORY}
    for parameters in _PENALISED
)


def _logprobs(
    parameters: Iterable[Mapping[str, Any]], top: int = 5
) -> tuple[Mapping[str, Any], ...]:
    return tuple({**one, "logprobs": top} for one in parameters)


MIXED = _logprobs(_PENALISED)
PRESENCE = {"presence_penalty": 1.5}
_BUDGETED = Case(({**PRESENCE, "thinking_token_budget": 0.75},))
#: Decoding as most servers do it: greedily, with draws, with a penalty, and with all of these.
_DECODING: Mapping[str, Case] = {
    BASELINE: Case(),
    "temperature 1": Case(({"temperature": 1.0},)),
    "presence 1.5": Case((PRESENCE,)),
    "mixed": Case(MIXED),
}
#: Drawn with no seed, with one for a request of 128, and with one for each.
_DRAWN = {"temperature": 1.0}
_SEEDED = tuple({**_DRAWN, "seed": seed} for seed in range(128))
_SEEDS: Mapping[str, Case] = {
    BASELINE: Case(),
    "temperature 1": Case((_DRAWN,)),
    "temperature 1, a seed in 128": Case((*_SEEDED[:1], *[_DRAWN] * 127)),
    "temperature 1, all seeded": Case(_SEEDED),
}
_GRAMMAR = {"grammar": True}
#: A tenth of the requests, and all of them.
_STRUCTURED: Mapping[str, Case] = {
    BASELINE: Case(),
    "a tenth, batch 128": Case((_GRAMMAR, *[{}] * 9)),
    "all, batch 128": Case((_GRAMMAR,)),
    "none, batch 32": Case(batch=32),
    "a tenth, batch 32": Case((_GRAMMAR, *[{}] * 9), batch=32),
    "all, batch 32": Case((_GRAMMAR,), batch=32),
}

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
                "mixed, batch 8": Case(MIXED, batch=8),
                "mixed, batch 32": Case(MIXED),
                "mixed, streamed": Case(MIXED, streamed=True),
                "mixed, no history": Case(_logprobs(_WITHOUT_HISTORY)),
                "mixed, no logprobs": Case(_PENALISED),
                "mixed, consumed at once": Case(MIXED, consumed=True),
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
            cases={BASELINE: Case(), "presence 1.5": Case((PRESENCE,))},
        ),
        Row(
            name="prime-rl-2772-thinking",
            title="A presence penalty on long outputs, with a thinking budget.",
            source="prime-rl pull request 2772",
            engine=HALF_B_THINKING,
            output=2048,
            cases={
                BASELINE: Case(),
                "presence 1.5, budget": _BUDGETED,
            },
        ),
        Row(
            name="tensor-parallel",
            title="Penalties and a thinking budget on two GPUs (TP=2).",
            title_on_cpu="A presence penalty, and a thinking budget.",
            source="prime-rl pull request 2772",
            engine=HALF_B_TP2,
            output=512,
            cases={
                BASELINE: Case(),
                "presence 1.5": Case((PRESENCE,)),
                "presence 1.5, budget": _BUDGETED,
            },
        ),
        Row(
            name="decode-half-b",
            title="Decoding with a model that the host bounds.",
            source="decode steps",
            engine=HALF_B,
            output=1024,
            cases=_DECODING,
        ),
        Row(
            name="decode-seven-b",
            title="Decoding with a model that the device bounds.",
            source="decode steps",
            engine=SEVEN_B,
            output=256,
            cases=_DECODING,
        ),
        Row(
            name="decode-hybrid",
            title="Decoding with a hybrid model.",
            source="decode steps",
            engine=HYBRID,
            output=512,
            cases=_DECODING,
        ),
        Row(
            name="seeds",
            title="Requests with seeds.",
            source="decode steps",
            engine=HALF_B,
            output=512,
            cases=_SEEDS,
        ),
        Row(
            name="pull-22760",
            title="Synchronous scheduling, alone and beside another stream's copies.",
            title_on_cpu="Logprobs.",
            source="vLLM pull request 22760",
            engine=HALF_B_SYNC,
            output=768,
            cases={
                BASELINE: Case(),
                "logprobs 5": Case(_logprobs([{}])),
                "logprobs 20": Case(_logprobs([{}], 20)),
                "logprobs 5 beside D2H": Case(_logprobs([{}]), beside=True),
            },
        ),
        Row(
            name="pull-23569",
            title="Asynchronous scheduling, alone and beside another stream's copies.",
            title_on_cpu="Logprobs and bad words.",
            source="vLLM pull request 23569",
            engine=HALF_B,
            output=768,
            cases={
                BASELINE: Case(),
                "logprobs 5": Case(_logprobs([{}])),
                "logprobs 5 beside D2H": Case(_logprobs([{}]), beside=True),
                "5 bad words": Case(({"bad_words": (3, 2, 1, 2, 1)},)),
            },
        ),
        Row(
            name="structured",
            title="Grammars, for a tenth of the requests and for all of them.",
            source="vLLM issue 49013",
            engine=HALF_B_STRUCTURED,
            output=512,
            cases=_STRUCTURED,
        ),
        Row(
            name="structured-sync",
            title="Grammars under synchronous scheduling.",
            source="vLLM issue 49013",
            engine=HALF_B_STRUCTURED_SYNC,
            output=512,
            cases=_STRUCTURED,
        ),
        Row(
            name="pull-35214",
            title="Model Runner V2's sampler, stock and overlaid.",
            source="vLLM pull request 35214",
            engine=SEVEN_B_V2,
            output=256,
            cases={BASELINE: Case(), "temperature 1": Case(({"temperature": 1.0, "seed": 1},))},
        ),
    )
}
