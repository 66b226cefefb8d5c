"""The feature logprobs: a client is given what the pinned output processor gives it."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.logprobs import DELTA, FINAL, PROCESSOR, Side, Step, Wish, tokenizer, tokens
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine import logprobs as upstream
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.frontend import token_texts

numbers = st.sampled_from([None, 0, 1, 3, -1])
wishes = st.builds(
    Wish,
    logprobs=numbers,
    prompt_logprobs=numbers,
    kind=st.sampled_from(RequestOutputKind),
    flat=st.booleans(),
    last=st.integers(2, 9),
)
kinds = st.sampled_from(
    [(torch.int32, torch.float32)] * 8
    + [(torch.int64, torch.float32), (torch.int32, torch.float64), (torch.int16, torch.float16)]
)
steps = st.builds(
    Step,
    counts=st.lists(st.integers(0, 3), min_size=3, max_size=3) | st.just([1, 1, 1]),
    width=st.sampled_from([6, 6, 6, 6, 1, 3]),
    seed=st.integers(0, 1 << 16),
    kinds=kinds,
)


@given(
    st.lists(wishes, min_size=1, max_size=3),
    st.lists(steps, min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
)
def test_clients_are_given_the_same(
    wished: list[Wish], taken: list[Step], text: bool, message: bool, interval: int
) -> None:
    sides = [Side(ours, wished, text, interval) for ours in (False, True)]
    for number, step in enumerate(taken):
        for side in sides:
            side.take(number, step, message)
        # Of what they were given before as well: some of it grows.
        stock, ours = (repr(side.given) for side in sides)
        assert ours == stock
    for side in sides:  # requests that have not ended yet
        for state in side.processor.request_states.values():
            reason = FinishReason.ABORT
            side.given.append(state.make_request_output([], None, reason, None, None))
    stock, ours = (repr(side.given) for side in sides)
    assert ours == stock


def run(ours: bool, wish: Wish, count: int) -> Side:
    """Let a request take its steps."""
    side = Side(ours, [wish], True)
    for number in range(count):
        side.take(number, Step([1], 21, number))
    return side


@pytest.mark.parametrize("kind", [DELTA, FINAL])
def test_the_collector_has_nothing_to_walk(kind: RequestOutputKind) -> None:
    def tracked(ours: bool) -> int:
        side = run(ours, Wish(20, 20, kind, last=999), 4)
        gc.collect()
        before = len(gc.get_objects())
        for number in range(4, 104):
            side.take(number, Step([1], 21, number))
            if kind == DELTA:
                side.given.clear()
        gc.collect()
        return len(gc.get_objects()) - before

    assert tracked(ours=False) > 100 * 2
    assert tracked(ours=True) < 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tokenizer has decoded."""
    decoded: list[Any] = []
    kind = type(tokenizer())
    decode = kind.decode

    def counted(self: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        decoded.append(ids)
        return decode(self, ids, *args, **kwargs)

    counted.__module__ = decode.__module__
    monkeypatch.setattr(kind, "decode", counted)
    monkeypatch.setattr(token_texts, "_texts", weakref.WeakKeyDictionary())
    return decoded


@pytest.mark.parametrize("ends", [True, False])
def test_no_step_decodes_more_than_stock_s(calls: list[Any], ends: bool) -> None:
    """Parts of characters take several calls: all those of a request would hold up its last."""
    most = []
    for ours in (False, True):
        side, counts = Side(ours, [Wish(5, kind=FINAL, last=40)], True), []
        for number in range(41 if ends else 40):
            calls.clear()
            side.take(number, Step([1], 6, number))
            counts.append(len(calls))
        calls.clear()
        side.processor.abort_requests(["0"], internal=True)
        most.append(max(*counts, len(calls)))
    assert most[0] > 6
    assert most[1] <= most[0]


def test_a_token_is_decoded_once(calls: list[Any]) -> None:
    decode = type(tokenizer()).decode
    for _ in range(2):
        run(True, Wish(1, kind=FINAL, last=30), 31)
    seen = [*calls]
    whole = {token for token in tokens() if not decode(tokenizer(), [token]).endswith("\ufffd")}
    alone = [ids[0] for ids in seen if len(ids) == 1 and ids[0] in whole]
    assert alone
    assert sorted(alone) == sorted(set(alone))


def test_a_client_may_change_what_it_was_given() -> None:
    one, other = (Side(True, [Wish(3)], True) for _ in range(2))
    for number in range(6):
        step = Step([1], 4, number)
        for side in (one, other):
            side.take(number, step)
        assert repr(one.given[-1]) == repr(other.given[-1])
        one.given[-1].outputs[0].logprobs[0].clear()


def test_the_processor_can_be_read_at_any_time() -> None:
    stock, ours = (run(side, Wish(2, 1, FINAL), 5) for side in (False, True))
    for number in range(5, 8):
        processors = [
            side.processor.request_states["0"].logprobs_processor for side in (stock, ours)
        ]
        for name in ("logprobs", "prompt_logprobs", "cumulative_logprob"):
            assert repr(getattr(processors[1], name)) == repr(getattr(processors[0], name))
        assert processors[1].logprobs is processors[1].logprobs
        for side in (stock, ours):
            side.take(number, Step([1], 4, number))


# What is left to upstream.


class Theirs(upstream.LogprobsProcessor):  # type: ignore[misc]
    """Somebody's own processor."""


def processor_type() -> type:
    """Return the class of the overlaid front end's processor of a request."""
    return type(Side(True, [Wish(3)], True).processor.request_states["0"].logprobs_processor)


@pytest.mark.parametrize("value", ["off", "-logprobs"])
def test_off_means_upstream(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(switch.NAME, value)
    assert processor_type() is upstream.LogprobsProcessor


def test_a_changed_processor_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = modules.overlaid(PROCESSOR)
    with monkeypatch.context() as patch:
        patch.setattr(module, "LogprobsProcessor", Theirs)
        assert processor_type() is Theirs
    with monkeypatch.context() as patch:
        patch.setattr(upstream.LogprobsProcessor, "_verify_tokens", lambda *_, **__: ["x"])
        assert processor_type() is upstream.LogprobsProcessor
    with monkeypatch.context() as patch:
        patch.setattr(upstream, "convert_ids_list_to_tokens", lambda *_: ["x"])
        assert processor_type() is upstream.LogprobsProcessor


def test_what_decodes_in_a_way_of_its_own_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is replaced after its texts were asked for."""
    made = tokenizer()
    assert token_texts.of(made) is token_texts.of(tokenizer()) is not None
    with monkeypatch.context() as patch:
        patch.setattr(type(made), "decode", lambda *_, **__: "x")
        assert token_texts.of(made) is None
    with monkeypatch.context() as patch:
        patch.setattr(made, "decode", lambda *_, **__: "x", raising=False)
        assert token_texts.of(made) is None
    theirs = {"__module__": "vllm", "decode": type(made).decode}
    for more in ({"__hash__": None}, {"__slots__": ()}, {"__module__": "theirs"}):
        assert token_texts.of(type("Odd", (), {**theirs, **more})()) is None
    assert token_texts.of(type("Even", (), theirs)()) is not None


class TestCollector:
    """The garbage collector, which threads pause and switch on and off."""

    @pytest.fixture(autouse=True)
    def restored(self) -> Any:
        thresholds, enabled = gc.get_threshold(), gc.isenabled()
        gc.set_threshold(50, 1000, 1000)
        yield
        gc.set_threshold(*thresholds)
        (gc.enable if enabled else gc.disable)()

    @pytest.mark.parametrize("on", [True, False])
    def test_it_is_paused_at_the_end_of_a_request(self, on: bool) -> None:
        """It is on or off afterwards as it was before."""
        side = run(True, Wish(20, kind=FINAL, last=120), 120)
        if not on:
            gc.disable()
        walks: list[str] = []
        gc.callbacks.append(lambda phase, _: walks.append(phase))
        side.take(120, Step([1], 21, 120))
        gc.callbacks.pop()
        assert gc.isenabled() is on
        assert gc.get_threshold() == (50, 1000, 1000)
        assert side.given[-1].outputs[0].logprobs
        assert len(walks) < 20  # 2,541 objects would be 50 walks, each of two phases
