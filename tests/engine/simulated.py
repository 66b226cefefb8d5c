"""Run drawn sets of requests through one real engine whose device decides as drawn.

    python simulated.py MODEL_DIR OUT.json reference
    python simulated.py MODEL_DIR OUT.json check REFERENCE.json
    python simulated.py MODEL_DIR OUT.json plants REFERENCE.json PLANT...

The first writes what each prepared request gives. The second, on an engine that schedules
asynchronously on the simulated device, lets Hypothesis draw which of them run together,
when each arrives and perhaps leaves, and when copies arrive; each must give the same. The
third does so again with each fault planted in the worker, where one must not.
"""

import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine.generate import plain
from engine.mixed import STUTTERS, start
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.asynchronous import simulate
from support.checkpoint import VOCABULARY
from support.witness import Witness

EXAMPLES = 120
#: For a planted fault: seconds to find it, and then to shrink what shows it; to so few
#: requests, and no further.
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
        """What vLLM is asked for."""
        from vllm import SamplingParams

        kind = dict(self.kind)
        bad = kind.pop("bad_words", None)
        length = 60 if endless else self.length
        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, **kind
        )
        # Words are turned to tokens by a tokenizer, and there is none.
        params._bad_words_token_ids = bad
        return params


class Visit(NamedTuple):
    """A prepared request, the step it arrives before, and how long it may stay."""

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
    """The requests, the same ones each time; a step has room for 48 of a prompt's tokens."""
    chance = random.Random(6)
    made = []
    for number in range(REQUESTS):
        kind = KINDS[number % len(KINDS)]
        # Some are just below a block's end, so that they need another one as they decode.
        lengths = [2, 31, 49] if ALL in kind.values() else [1, 3, 30, 31, 49, 62, 63, 94]
        prompt = chance.choices(range(3, VOCABULARY), k=chance.choice(lengths))
        made.append(Request(prompt, kind, chance.randint(2, 12)))
    return made


class Wrong(AssertionError):
    """A request gave something else."""


class Bench:
    """One engine, and the prepared requests."""

    def __init__(self, model: Path, asynchronous: bool) -> None:
        self.engine = start(model, asynchronous, blocks=10, max_logprobs=ALL)
        self.requests = prepared()
        self._runs = itertools.count()

    def run(self, visits: list[Visit]) -> list[tuple[Visit, Any]]:
        """What each request gives that does not leave."""
        from vllm import TokensPrompt

        number = next(self._runs)
        names = {f"{number}-{at}": visit for at, visit in enumerate(visits)}
        given_ = {}
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
                        given_[result.request_id] = plain_result(result)
                if step >= 20 and not self.engine.has_unfinished_requests():
                    break
        finally:
            self.engine.abort_request(list(names))
            while self.engine.has_unfinished_requests():
                self.engine.step()
        return [(visit, given_.get(name)) for name, visit in names.items() if visit.stays is None]

    def references(self) -> list[Any]:
        """What each of them gives."""
        return [result for _, result in self.run([Visit(n, n, None) for n in range(REQUESTS)])]


def plain_result(result: Any) -> dict[str, Any]:
    """What came out of a request."""
    output = result.outputs[0]
    return {
        "tokens": list(output.token_ids),
        "finish": output.finish_reason,
        "logprobs": plain(output.logprobs),
        "prompt_logprobs": plain(result.prompt_logprobs),
    }


def same_logprobs(found: Any, expected: Any) -> bool:
    """Whether the logprobs are the same, but for what depends on which requests run together.

    That is the last bits of the values, and so the order of tokens that nearly tie.
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
    """Raise if a request gave something else than alone."""
    for name in ("tokens", "finish"):
        if found is None or found[name] != expected[name]:
            raise Wrong(f"{visit}: {name}: {found and found[name]}, not {expected[name]}")
    for name in ("logprobs", "prompt_logprobs"):
        if not same_logprobs(found[name], expected[name]):
            raise Wrong(f"{visit}: {name} differ")


class Trial:
    """The property, and the smallest example that fails it."""

    def __init__(self, bench: Bench, references: list[Any], patience: float | None) -> None:
        self.bench = bench
        self.references = references
        self.until = patience and time.monotonic() + patience
        self.examples = 0
        self.wrong: dict[str, Any] | None = None

    def attempt(self, visits: list[Visit], decisions: list[int]) -> None:
        """Try one example; once time is up, end the search for one, or the shrinking."""
        if self.until is not None:
            if self.wrong is not None and len(self.wrong["visits"]) <= FEW:
                return
            if time.monotonic() > self.until:
                if self.wrong is None:
                    raise TimeoutError
                return
        self.examples += 1
        try:
            self.bench.engine.collective_rpc(simulate, args=(decisions,))
            for visit, found in self.bench.run(visits):
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
        """Try that many examples; what is wrong, if anything."""
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
        except Exception:  # what is wrong is taken down, and shrinking may be cut off
            assert self.wrong is not None or self.until is not None
        took = time.monotonic() - began
        return {"examples": self.examples, "wrong": self.wrong, "seconds": round(took, 1)}


def check(model: Path, references: list[Any]) -> dict[str, Any]:
    """What is wrong, if anything, and what the engine and its device went through."""
    bench = Bench(model, asynchronous=True)
    witness = Witness(bench.engine)
    outcome = Trial(bench, references, None).run(EXAMPLES, derandomize=False)
    (device,) = bench.engine.collective_rpc(simulate, args=([],))
    return outcome | {"evidence": witness.evidence() | device}


def check_plants(model: Path, references: list[Any], names: list[str]) -> dict[str, Any]:
    """By planted fault, what goes wrong."""
    from support.mutants import mutate_worker  # there only where the overlay is

    bench = Bench(model, asynchronous=True)
    outcomes = {}
    for name in names:
        bench.engine.collective_rpc(mutate_worker, args=(name,))
        outcomes[name] = Trial(bench, references, PATIENCE).run(10**6, derandomize=True)
    return outcomes


def main(model: Path, out: Path, mode: str, *more: str) -> None:
    """Write what came out."""
    made: Any
    if mode == "reference":
        made = Bench(model, asynchronous=False).references()
    else:
        references = json.loads(Path(more[0]).read_text())
        plants = list(more[1:])
        made = check_plants(model, references, plants) if plants else check(model, references)
    out.write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
