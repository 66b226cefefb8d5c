"""The feature grammars in the scheduler: masks are upstream's, however many threads fill them."""

import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.grammars import add, make_scheduler, tokens
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.readiness.core import grammar_masks
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

MANAGER = "vllm/v1/structured_output/__init__.py"
#: Grammars, and texts that they begin with; the second is complete.
GRAMMARS: list[tuple[dict[str, Any], str]] = [
    ({"regex": "[a-f0-9]{9}"}, "a1f"),
    ({"choice": ["10", "12"]}, "12</s>"),
    ({"json": {"type": "object"}}, '{"a": "'),
    ({"json": {"type": "array", "items": {"type": "integer"}}}, "[10, "),
]


class Reasoner:
    """Has a request think until its end is seen."""

    def __init__(self, tokenizer: object) -> None:
        del tokenizer

    def is_reasoning_end(self, tokens: list[int]) -> bool:
        del tokens
        return False


class Pair:
    """Upstream's manager and ours, with requests at different places of their grammars."""

    def __init__(self) -> None:
        scheduler = make_scheduler(Scheduler)
        self.theirs = scheduler.structured_output_manager
        self.theirs.vllm_config.scheduler_config.max_num_seqs = 12
        self.requests: dict[str, Any] = {}
        for number in range(12):
            grammar, text = GRAMMARS[number % len(GRAMMARS)]
            request = add(scheduler, f"r{number}", grammar)
            self.requests[request.request_id] = request
            accepted = tokens(text[: number % 5]) if "<" not in text else [*tokens("12"), 2]
            assert request.structured_output_request.grammar.accept_tokens("", accepted)
            request.structured_output_request.reasoning_ended = number % 3 != 0
        self.ours = self.renewed()

    def renewed(self) -> Any:
        """A manager of ours that has filled nothing."""
        ours = modules.overlaid(MANAGER).StructuredOutputManager(self.theirs.vllm_config)
        ours.backend, ours.tokenizer = self.theirs.backend, self.theirs.tokenizer
        return ours

    def masks(self, names: list[str], reasons: bool = False) -> list[torch.Tensor]:
        """Upstream's masks and ours."""
        both = []
        for manager in (self.theirs, self.ours):
            manager.reasoner_cls = Reasoner if reasons else None
            for request in self.requests.values():
                request.structured_output_request.reasoner = None
            both.append(torch.tensor(manager.grammar_bitmask(self.requests, names, {})))
        return both


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


@pytest.fixture
def fresh(pair: Pair) -> Pair:
    """The pair, whose manager of ours has filled nothing."""
    pair.ours = pair.renewed()
    return pair


@given(
    steps=st.lists(
        st.tuples(st.permutations(range(12)), st.integers(1, 12), st.booleans()), max_size=5
    ),
    worth=st.sampled_from([1e-9, 1e-3]),
)
@draws(60)
def test_masks_are_upstreams(pair: Pair, steps: list[Any], worth: float) -> None:
    """With one thread or several, in any order, with grammars that do not apply or are complete."""
    with mock.patch.object(grammar_masks, "_WORTH", worth), cores(8):
        for order, count, reasons in steps:
            theirs, ours = pair.masks([f"r{number}" for number in order[:count]], reasons)
            assert torch.equal(ours, theirs)


def cores(count: int) -> Any:
    return mock.patch.object(os, "sched_getaffinity", lambda _: range(count))


def watched(pair: Pair, names: list[str], wait: Callable[[], object] = int) -> set[str]:
    """The threads that fill masks of ours."""
    seen: set[str] = set()
    fill = XgrammarGrammar.fill_bitmask

    def watch(grammar: Any, masks: torch.Tensor, row: int) -> None:
        seen.add(threading.current_thread().name)
        wait()
        fill(grammar, masks, row)

    with mock.patch.object(XgrammarGrammar, "fill_bitmask", watch):
        pair.ours.grammar_bitmask(pair.requests, names, {})
    return seen


def test_threads_help_after_a_step_that_took_long(fresh: Pair) -> None:
    """They fill masks at the same time, and leave again when masks are cheap."""
    with cores(2), mock.patch.object(grammar_masks, "_WORTH", 1e-9):
        assert watched(fresh, ["r0", "r2"]) == {"MainThread"}
        both = threading.Barrier(2)
        assert len(watched(fresh, ["r0", "r2"], lambda: both.wait(60))) == 2
    assert watched(fresh, ["r0", "r2"]) == {"MainThread"}


def test_one_core_has_one_thread(fresh: Pair) -> None:
    with cores(1), mock.patch.object(grammar_masks, "_WORTH", 1e-9):
        for _ in range(2):
            assert watched(fresh, ["r0", "r2"]) == {"MainThread"}


@pytest.mark.parametrize("helpers", [0, 3])
def test_an_error_is_raised_as_upstream_raises_it(fresh: Pair, helpers: int) -> None:
    error = RuntimeError("no mask")
    with cores(8), mock.patch.object(grammar_masks, "_WORTH", 1e-9 if helpers else 1e9):
        fresh.masks(["r0", "r2"])
        with (
            mock.patch.object(XgrammarGrammar, "fill_bitmask", side_effect=error),
            pytest.raises(RuntimeError, match="no mask"),
        ):
            fresh.ours.grammar_bitmask(fresh.requests, ["r0", "r2"], {})
        theirs, ours = fresh.masks(["r2", "r0"])
        assert torch.equal(ours, theirs)


def test_threads_fill_in_the_inference_mode_of_their_caller(fresh: Pair) -> None:
    """A mask that was made in inference mode can be written to in no other."""
    names = [f"r{number}" for number in range(12)]
    with cores(8), mock.patch.object(grammar_masks, "_WORTH", 1e-9), torch.inference_mode():
        for reasons in (False, True):
            theirs, ours = fresh.masks(names, reasons)
            assert torch.equal(ours, theirs)


def test_threads_that_cannot_be_started_are_done_without(fresh: Pair) -> None:
    names = ["r0", "r2", "r4"]
    started = threading.Thread.start
    count = []

    def start(thread: threading.Thread) -> None:
        count.append(thread)
        if len(count) == 2:
            raise RuntimeError("can't start new thread")
        started(thread)

    with cores(8), mock.patch.object(grammar_masks, "_WORTH", 1e-9):
        fresh.masks(names)
        with mock.patch.object(threading.Thread, "start", start):
            theirs, ours = fresh.masks(names)
        assert torch.equal(ours, theirs)
        assert len(count) == 2
        assert watched(fresh, names) == {"MainThread"}


def left_to_upstream(pair: Pair, drafts: int = 0) -> bool:
    masks = pair.ours.backend.allocate_token_bitmask(16)
    pair.ours._grammar_bitmask = masks
    return grammar_masks.fill(pair.ours, pair.requests, ["r0"], drafts) is None


def test_what_is_unknown_is_upstreams(fresh: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not left_to_upstream(fresh)
    assert left_to_upstream(fresh, drafts=2)
    own: Any = type("Own", (type(fresh.theirs.backend),), {})
    fresh.ours.backend = own.__new__(own)
    fresh.ours.backend.vocab_size = 32
    assert left_to_upstream(fresh)
    fresh.ours.backend = fresh.theirs.backend
    structured = fresh.requests["r0"].structured_output_request
    derived = type("Derived", (XgrammarGrammar,), {})
    structured.grammar.__class__ = derived
    try:
        assert left_to_upstream(fresh)
    finally:
        structured.grammar.__class__ = XgrammarGrammar
    fresh.ours = fresh.renewed()
    fresh.ours._fill_bitmasks = lambda _: None
    assert left_to_upstream(fresh)
    monkeypatch.setenv("VLLM_READINESS", "-grammars")
    fresh.ours = fresh.renewed()
    assert left_to_upstream(fresh)
