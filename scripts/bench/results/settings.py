"""Settings of the engines of runs: figures of equal requests differ by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bench.errors import Failure
from bench.results.run_file import Json
from bench.results.slices import Group


class Settings(NamedTuple):
    """Settings of an engine, and the load.

    Attributes:
        load: "traffic", "steady" (batches), "steps" (of traffic, timed) or "HTTP".
        model: "0.5B", "7B", "hybrid", or another name.
        graphs: a name of :data:`bench.loops.child.GRAPHS`, or "default" for vLLM's; through HTTP
            the number of API servers, or "the Rust front end".
        concurrency: requests at a time.
        reasoning: whether a thinking budget is configured, by which stock waits in each step.
        gpus: that share each layer.
        device: the GPU.
        switch: value of VLLM_READINESS; empty for everything.
    """

    load: str
    model: str
    graphs: str
    concurrency: int
    reasoning: bool = False
    gpus: int = 1
    device: str = ""
    switch: str = ""

    def __str__(self) -> str:
        """Return what a table says of the engine."""
        parts = [self.model, self.graphs, "thinking budget configured" * self.reasoning]
        return ", ".join(filter(None, [*parts, f"{self.gpus} GPUs" * (self.gpus > 1)]))


_MODELS = {"half-b": "0.5B", "seven-b": "7B"}
#: The engines of runs that were converted, which are named by their requests.
_CONVERTED: Mapping[str, Settings] = {
    **dict.fromkeys(
        ("decode-half-b", "seeds", "pull-23569", "structured"),
        Settings("steady", "0.5B", "decodes", 128),
    ),
    "decode-seven-b": Settings("steady", "7B", "decodes", 32),
    "prime-rl-2772-thinking": Settings("steady", "0.5B", "decodes", 128, reasoning=True),
    "tensor-parallel": Settings("steady", "0.5B", "decodes", 128, reasoning=True, gpus=2),
    "vllm serve": Settings("HTTP", "0.5B", "default", 32),
}
#: Requests of these engines to the names of :data:`bench.loops.rows.ROWS`. They were greedy.
_REQUESTS = {
    **{"plain": "greedy", "none": "greedy", "temperature 1": "plain"},
    **{"presence 1.5": "presence", "presence_penalty 1.5": "presence"},
    **{"presence 1.5, budget": "thinking-presence", "5 bad words": "bad-words"},
    **{"logprobs 5": "logprobs", "temperature 1, all seeded": "seeded"},
    **{"a tenth": "grammars", "all": "grammars of all"},
}
_ENGINE = re.compile(r"(?P<name>\S+) (?P<graphs>\S+)(?P<reasoning> thinking)?( TP=(?P<gpus>\d+))?")
#: An engine of bench.serving.
_SERVED = re.compile(r"(?P<name>\S+), (?P<front_end>\d+ API servers?|the Rust front end)")


def settings_of(run: Json, group: Group) -> tuple[Settings, str]:
    """Return the settings of a group's engine, and the name of its requests.

    Raises:
        Failure: the engine is not known.
    """
    engine, case, _ = group
    sized = re.fullmatch(r"(.*), (?:batch )?(\d+)", case)
    requests, count = (sized[1], int(sized[2])) if sized else (case, 0)
    about, title = _ENGINE.fullmatch(engine), run["title"]
    served = _SERVED.fullmatch(engine)
    if (settings := _CONVERTED.get(engine)) is not None:
        requests = _REQUESTS.get(requests, requests)
        settings = settings._replace(concurrency=count or settings.concurrency)
    elif served is not None and count:
        model = _MODELS.get(served["name"], served["name"])
        settings = Settings("HTTP", model, served["front_end"], count)
    elif about is not None and count:
        load = "steady" if title.startswith("Steady batches") else "traffic"
        load = "steps" if "in the client's process" in title else load
        model = _MODELS.get(about["name"], about["name"])
        gpus = int(about["gpus"] or 1)
        settings = Settings(load, model, about["graphs"], count, bool(about["reasoning"]), gpus)
    else:
        raise Failure(f"nothing is known of the engine of {engine}, {case}")
    if own := title.partition(" Model: ")[2]:
        settings = settings._replace(model=own.rstrip("."))
    device = re.search(r"H\d+|CPU", run["machine"]["device"])
    switch = run["environment"].get("VLLM_READINESS", "")
    return settings._replace(device=device[0] if device else "", switch=switch), requests
