"""Settings of the engines of runs: figures of equal requests differ by them."""

from __future__ import annotations

import re
from typing import NamedTuple

from bench.errors import Failure
from bench.results.run_file import Json
from bench.results.slices import Group


class Settings(NamedTuple):
    """Settings of an engine, and the load.

    Attributes:
        load: "traffic", "steps" (of traffic, timed) or "HTTP".
        model: "0.5B", "7B", "hybrid", or another name.
        graphs: a name of :data:`bench.loops.child.GRAPHS`; through HTTP the number of API servers,
            or "the Rust front end".
        concurrency: requests at a time; 0 if unknown.
        reasoning: whether a thinking budget is configured, by which stock waits in each step.
        device: the GPU.
        switch: value of VLLM_READINESS; empty for everything.
    """

    load: str
    model: str
    graphs: str
    concurrency: int
    reasoning: bool = False
    device: str = ""
    switch: str = ""

    def __str__(self) -> str:
        """Return what a table says of the engine."""
        parts = [self.model, self.graphs, "thinking budget configured" * self.reasoning]
        return ", ".join(filter(None, parts))


_MODELS = {"half-b": "0.5B", "seven-b": "7B"}
_ENGINE = re.compile(r"(?P<name>\S+) (?P<graphs>\S+)(?P<reasoning> thinking)?")
#: An engine of bench.serving.
_SERVED = re.compile(r"(?P<name>\S+), (?P<graphs>\d+ API servers?|the Rust front end)")


def settings_of(run: Json, group: Group) -> tuple[Settings, str]:
    """Return the settings of a group's engine, and the name of its requests.

    Raises:
        Failure: the engine is not known.
    """
    engine, case, _ = group
    title, about = run["title"], _SERVED.fullmatch(engine) or _ENGINE.fullmatch(engine)
    if about is None:
        raise Failure(f"nothing is known of the engine of {engine}, {case}")
    load = "steps" if "in the client's process" in title else "traffic"
    if about.re is _SERVED or "`vllm bench serve" in title:
        load = "HTTP"
    requests, _, count = case.rpartition(", ")
    if not count.isdecimal():  # of the user's own client
        requests, count = case, "0"
    model = title.partition(" Model: ")[2].rstrip(".") or _MODELS.get(about["name"], about["name"])
    reasoning = bool(about.groupdict().get("reasoning"))
    device = re.search(r"H\d+|CPU", run["machine"]["device"])
    switch = run["environment"].get("VLLM_READINESS", "")
    of = (load, model, about["graphs"], int(count), reasoning, device[0] if device else "")
    return Settings(*of, switch), requests
