"""Drawn sets of requests on one real engine whose device decides as drawn.

The engine schedules asynchronously on the simulated device of :mod:`support.asynchronous`.
Hypothesis draws which requests run together, when each arrives and is perhaps aborted, and when
copies arrive. Each request must give stock's output.
"""

import itertools
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

from engine.mixed import STUTTERS, build_small_cache
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.asynchronous import simulate
from support.checkpoint import VOCABULARY
from support.engine_loop import Arrival, run_requests
from support.engine_stats import EngineStats

EXAMPLES = 40
ALL = -1
SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"logprobs": 1, "prompt_logprobs": 0},
    {"logprobs": 20},
    {"logprobs": ALL},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 5, "logprobs": 5},
    {"prompt_logprobs": ALL},
    {"presence_penalty": 1.8, "logprobs": 1},
    {"frequency_penalty": 1.2, "prompt_logprobs": 2},
    {"repetition_penalty": 1.6, "logprobs": 7},
    {"bad_words": STUTTERS, "repetition_penalty": 0.5, "logprobs": 1},
    {"bad_words": STUTTERS, "prompt_logprobs": 3},
]
REQUESTS = 3 * len(SETTINGS)
TOLERANCE = 1e-4


class Request(NamedTuple):
    """One of the prepared requests."""

    prompt: list[int]
    fields: dict[str, Any]
    length: int


class Visit(NamedTuple):
    """A prepared request, the step before which it arrives, and its steps before an abort."""

    request: int
    arrives: int
    stays: int | None


VISITS = st.lists(
    st.builds(
        Visit,
        st.integers(0, REQUESTS - 1),
        st.integers(0, 4),
        st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12)),
    ),
    min_size=1,
    max_size=10,
)
DECISIONS = st.lists(st.integers(0, 5), max_size=20)


def prepared() -> list[Request]:
    """Draw the requests, the same ones each time; a step computes at most 48 prompt tokens."""
    chance = random.Random(6)
    requests = []
    for number in range(REQUESTS):
        fields = SETTINGS[number % len(SETTINGS)]
        # Some end just below a block's end, and need another block as they decode.
        lengths = [2, 31, 49] if ALL in fields.values() else [1, 3, 30, 31, 49, 62, 63, 94]
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice(lengths))
        requests.append(Request(prompt, fields, chance.randint(2, 12)))
    return requests


class Wrong(AssertionError):
    """A request gave another output."""


class Driver:
    """One engine, and the prepared requests."""

    def __init__(self, model: Path, asynchronous: bool) -> None:
        self.engine = build_small_cache(model, asynchronous, blocks=10, max_logprobs=ALL)
        self.requests = prepared()
        self._runs = itertools.count()

    def run(self, visits: list[Visit]) -> list[tuple[Visit, Any]]:
        """Run requests, and return each visit that is not aborted with its output."""
        number = next(self._runs)
        arrivals = []
        for index, (request, step, stays) in enumerate(visits):
            prompt, fields, length = self.requests[request]
            params = {**fields, "ignore_eos": True}
            params["max_tokens"] = length if stays is None else 60
            aborted = None if stays is None else step + stays
            arrivals.append(Arrival(f"{number}-{index}", prompt, params, step, aborted))
        try:
            outputs, _ = run_requests(self.engine, arrivals)
        finally:
            self.engine.abort_request([request.name for request in arrivals])
            while self.engine.has_unfinished_requests():
                self.engine.step()
        pairs = zip(visits, arrivals, strict=True)
        return [(visit, outputs.get(a.name)) for visit, a in pairs if visit.stays is None]

    def references(self) -> list[Any]:
        """Return each request's output, with all of them running."""
        return [output for _, output in self.run([Visit(n, n, None) for n in range(REQUESTS)])]


def same_logprobs(output: Any, expected: Any) -> bool:
    """Return whether logprobs are the same but for their last bits and the order of near ties.

    Both depend on which requests share a batch.
    """
    if output is None or expected is None:
        return output is expected
    return len(output) == len(expected) and all(map(_same_position, output, expected))


def _same_position(output: Any, expected: Any) -> bool:
    if output is None or expected is None:
        return output is expected
    # The first is the sampled token, or the prompt's.
    (token, _, rank), (expected_token, _, expected_rank) = output[0], expected[0]
    if token != expected_token or abs(rank - expected_rank) > 1 or len(output) != len(expected):
        return False
    values = {token: value for token, value, _ in expected}
    lowest = min(values.values())
    return all(
        math.isclose(value, values.get(token, lowest), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for token, value, _ in output
    )


def compare(visit: Visit, output: Any, expected: Any) -> None:
    """Raise :class:`Wrong` if a request's output is not the reference."""
    for name in ("tokens", "finish"):
        if output is None or output[name] != expected[name]:
            raise Wrong(f"{visit}: {name}: {output and output[name]}, not {expected[name]}")
    for name in ("logprobs", "prompt_logprobs"):
        if not same_logprobs(output[name], expected[name]):
            raise Wrong(f"{visit}: {name} differ")


def check(model: Path, references: list[Any]) -> dict[str, Any]:
    """Compare drawn sets of requests and timings with the references.

    Returns:
        The number of examples, and the statistics of the engine and its device.

    Raises:
        Wrong: a request gave another output; Hypothesis prints a small example.
    """
    driver = Driver(model, asynchronous=True)
    stats = EngineStats(driver.engine)
    examples = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(VISITS, DECISIONS)
    def compare_all(visits: list[Visit], decisions: list[int]) -> None:
        nonlocal examples
        examples += 1
        driver.engine.collective_rpc(simulate, args=(decisions,))
        for visit, output in driver.run(visits):
            compare(visit, output, references[visit.request])

    compare_all()
    (device,) = driver.engine.collective_rpc(simulate, args=([],))
    return {"examples": examples, "stats": {**stats.to_json(), **device}}
