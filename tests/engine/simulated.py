"""Run drawn sets of requests through one real engine whose device decides as drawn.

    python simulated.py MODEL_DIR OUT.json reference
    python simulated.py MODEL_DIR OUT.json check REFERENCE.json
    python simulated.py MODEL_DIR OUT.json plants REFERENCE.json PLANT...

The first writes the output of each prepared request. The second runs an engine that schedules
asynchronously on the simulated device: Hypothesis draws which requests run together, when each
arrives and is perhaps aborted, and when copies arrive; each request must give the same output.
The third does the same with each fault planted in the worker, until an output differs.
"""

import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine.generate import logprob_lists
from engine.mixed import STUTTERS, start
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.asynchronous import simulate
from support.checkpoint import VOCABULARY
from support.engine_stats import EngineStats
from support.params import sampling_params

EXAMPLES = 120
#: Seconds to find a planted fault and to shrink the example that shows it, and the number of
#: requests at which shrinking ends.
PATIENCE = 15.0
FEW = 3

ALL = -1
KINDS: list[dict[str, Any]] = [
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
REQUESTS = 3 * len(KINDS)
TOLERANCE = 1e-4


class Request(NamedTuple):
    """One of the prepared requests."""

    prompt: list[int]
    kind: dict[str, Any]
    length: int

    def parameters(self, endless: bool) -> Any:
        """The request's SamplingParams."""
        length = 60 if endless else self.length
        return sampling_params(max_tokens=length, ignore_eos=True, **self.kind)


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
        kind = KINDS[number % len(KINDS)]
        # Some end just below a block's end, and need another block as they decode.
        lengths = [2, 31, 49] if ALL in kind.values() else [1, 3, 30, 31, 49, 62, 63, 94]
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice(lengths))
        requests.append(Request(prompt, kind, chance.randint(2, 12)))
    return requests


class Wrong(AssertionError):
    """A request gave another output."""


class Driver:
    """One engine, and the prepared requests."""

    def __init__(self, model: Path, asynchronous: bool) -> None:
        self.engine = start(model, asynchronous, blocks=10, max_logprobs=ALL)
        self.requests = prepared()
        self._runs = itertools.count()

    def run(self, visits: list[Visit]) -> list[tuple[Visit, Any]]:
        """Run requests; each visit that is not aborted, and its output."""
        from vllm import TokensPrompt

        number = next(self._runs)
        names = {f"{number}-{index}": visit for index, visit in enumerate(visits)}
        outputs = {}
        try:
            for step in itertools.count():
                for name, visit in names.items():
                    if visit.arrives == step:
                        request = self.requests[visit.request]
                        prompt = TokensPrompt(prompt_token_ids=request.prompt)
                        params = request.parameters(endless=visit.stays is not None)
                        self.engine.add_request(name, prompt, params)
                    if visit.stays is not None and visit.arrives + visit.stays == step:
                        self.engine.abort_request([name])
                for result in self.engine.step():
                    if result.finished:
                        outputs[result.request_id] = _output(result)
                if step >= 20 and not self.engine.has_unfinished_requests():
                    break
        finally:
            self.engine.abort_request(list(names))
            while self.engine.has_unfinished_requests():
                self.engine.step()
        return [(visit, outputs.get(name)) for name, visit in names.items() if visit.stays is None]

    def references(self) -> list[Any]:
        """Each request's output, with all of them running."""
        return [result for _, result in self.run([Visit(n, n, None) for n in range(REQUESTS)])]


def _output(result: Any) -> dict[str, Any]:
    output = result.outputs[0]
    return {
        "tokens": list(output.token_ids),
        "finish": output.finish_reason,
        "logprobs": logprob_lists(output.logprobs),
        "prompt_logprobs": logprob_lists(result.prompt_logprobs),
    }


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
    """Report what is wrong, and the statistics of the engine and its device."""
    driver = Driver(model, asynchronous=True)
    stats = EngineStats(driver.engine)
    outcome = Trial(driver, references, None).run(EXAMPLES, derandomize=False)
    (device,) = driver.engine.collective_rpc(simulate, args=([],))
    return {**outcome, "stats": {**stats.to_json(), **device}}


def check_plants(model: Path, references: list[Any], names: list[str]) -> dict[str, Any]:
    """By planted fault, report what is wrong."""
    from support.mutants import mutate_worker  # importable only with the overlay

    driver = Driver(model, asynchronous=True)
    outcomes = {}
    for name in names:
        driver.engine.collective_rpc(mutate_worker, args=(name,))
        outcomes[name] = Trial(driver, references, PATIENCE).run(10**6, derandomize=True)
    return outcomes


def main(model: Path, out: Path, mode: str, *more: str) -> None:
    """Write the outputs or the report."""
    report: Any
    if mode == "reference":
        report = Driver(model, asynchronous=False).references()
    else:
        references = json.loads(Path(more[0]).read_text())
        plants = list(more[1:])
        report = check_plants(model, references, plants) if plants else check(model, references)
    out.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
