"""Drawn sets of requests on one real engine whose device decides as drawn.

The engine schedules asynchronously on the simulated device of :mod:`support.asynchronous`.
Hypothesis draws which requests run together, when each arrives and is perhaps aborted, and when
copies arrive. Each request must give stock's output.
"""

import itertools
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine.mixed import STUTTERS, build_small_cache
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.asynchronous import simulate
from support.checkpoint import VOCABULARY
from support.engine_loop import Arrival, run_requests
from support.engine_stats import EngineStats

EXAMPLES = 40
#: Seconds to find a planted fault and to shrink the example that shows it, and the number of
#: requests at which shrinking ends.
PATIENCE = 15.0
FEW = 3

#: Faults of a runner that frees what it sampled before it is read, or drops a readback unread:
#: this one does neither.
HARMLESS = {"sources let go of", "reused in flight"}

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
    """The requests, the same ones each time; a step computes 48 tokens of a prompt at most."""
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
        """Run requests; each visit that is not aborted, and its output."""
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
        """Each request's output, with all of them running."""
        return [output for _, output in self.run([Visit(n, n, None) for n in range(REQUESTS)])]


def same_logprobs(found: Any, expected: Any) -> bool:
    """Whether logprobs are the same but for their last bits, and the order of near ties.

    Both depend on which requests share a batch.
    """
    if found is None or expected is None:
        return found is expected
    return len(found) == len(expected) and all(map(_same_position, found, expected))


def _same_position(found: Any, expected: Any) -> bool:
    if found is None or expected is None:
        return found is expected
    # The first is the sampled token, or the prompt's.
    (token, _, rank), (expected_token, _, expected_rank) = found[0], expected[0]
    if token != expected_token or abs(rank - expected_rank) > 1 or len(found) != len(expected):
        return False
    values = {token: value for token, value, _ in expected}
    lowest = min(values.values())
    return all(
        math.isclose(value, values.get(token, lowest), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for token, value, _ in found
    )


def compare(visit: Visit, found: Any, expected: Any) -> None:
    """Raise :class:`Wrong` if a request's output is not the reference."""
    for name in ("tokens", "finish"):
        if found is None or found[name] != expected[name]:
            raise Wrong(f"{visit}: {name}: {found and found[name]}, not {expected[name]}")
    for name in ("logprobs", "prompt_logprobs"):
        if not same_logprobs(found[name], expected[name]):
            raise Wrong(f"{visit}: {name} differ")


class Trial:
    """A search for an example that fails, and the smallest found so far."""

    def __init__(self, driver: Driver, references: list[Any], patience: float | None) -> None:
        self.driver = driver
        self.references = references
        self.until = patience and time.monotonic() + patience
        self.examples = 0
        self.wrong: dict[str, Any] | None = None

    def attempt(self, visits: list[Visit], decisions: list[int]) -> None:
        """Try one example; when time is up, end the search or the shrinking."""
        if self.until is not None:
            if self.wrong is not None and len(self.wrong["visits"]) <= FEW:
                return
            if time.monotonic() > self.until:
                if self.wrong is None:
                    raise TimeoutError
                return
        self.examples += 1
        try:
            self.driver.engine.collective_rpc(simulate, args=(decisions,))
            for visit, found in self.driver.run(visits):
                compare(visit, found, self.references[visit.request])
        except Exception as error:
            if self.wrong is None or len(visits) <= len(self.wrong["visits"]):
                self.wrong = {
                    "visits": visits,
                    "decisions": decisions,
                    "error": f"{type(error).__name__}: {error}"[:300],
                }
            raise

    def run(self, examples: int, derandomize: bool) -> dict[str, Any]:
        """Try a number of examples, and report what is wrong."""
        fixed = settings(
            max_examples=examples,
            derandomize=derandomize,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )

        @fixed
        @given(VISITS, DECISIONS)
        def holds(visits: list[Visit], decisions: list[int]) -> None:
            self.attempt(visits, decisions)

        began = time.monotonic()
        try:
            holds()
        except Exception:  # self.wrong holds the example; shrinking may be cut off
            assert self.wrong is not None or self.until is not None
        took = time.monotonic() - began
        return {"examples": self.examples, "wrong": self.wrong, "seconds": round(took, 1)}


def check(model: Path, references: list[Any]) -> dict[str, Any]:
    """Report a wrong output, if any, and the statistics of the engine and its device."""
    driver = Driver(model, asynchronous=True)
    stats = EngineStats(driver.engine)
    outcome = Trial(driver, references, None).run(EXAMPLES, derandomize=False)
    (device,) = driver.engine.collective_rpc(simulate, args=([],))
    return {**outcome, "stats": {**stats.to_json(), **device}}


def check_mutants(model: Path, references: list[Any]) -> dict[str, Any]:
    """Report a wrong output by mutant of :mod:`support.mutants`, but for :data:`HARMLESS`."""
    from support.mutants import MUTANTS, mutate_worker  # importable only with the overlay

    driver = Driver(model, asynchronous=True)
    outcomes = {}
    for name in sorted(MUTANTS.keys() - HARMLESS):
        driver.engine.collective_rpc(mutate_worker, args=(name,))
        outcomes[name] = Trial(driver, references, PATIENCE).run(10**6, derandomize=True)
    return outcomes
