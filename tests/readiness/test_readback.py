"""Readbacks on a simulated device: the host reads the values that the device had.

The device decides when copies arrive. The oracle is a clone of each source, taken as its
readback starts.
"""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.asynchronous import cycling
from support.device import Device, installed, poison
from support.examples import draws, examples
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.outputs.readback import Readback, Readbacks

CPU = torch.device("cpu")
LEAST = 2048
DTYPES = [
    *(torch.int32, torch.int64, torch.float32),
    *(torch.uint8, torch.bfloat16, torch.bool),
]
PROMPT_DTYPES = [torch.int32, torch.float32, torch.int32]
_seeds = itertools.count()

Shape = tuple[tuple[int, ...], torch.dtype]

PICK = st.integers(0, 5)
DECISIONS = st.lists(PICK, max_size=12)
WIDTHS = st.sampled_from([1, 2, 6, 21, 38])
SHAPES = st.tuples(
    st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 4)),
        st.tuples(st.integers(0, 4), WIDTHS),
        st.tuples(st.integers(0, 3), st.integers(1, 2), st.integers(1, 3)),
    ),
    st.sampled_from(DTYPES),
)


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Draw data, different each time."""
    generator = torch.Generator().manual_seed(next(_seeds))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    highest = 2 if dtype == torch.bool else 150
    return torch.randint(0, highest, tuple(shape), generator=generator).to(dtype)


def assert_same(read: Any, expected: torch.Tensor) -> None:
    """Require the same shape, dtype and bytes, including NaNs."""
    tensor = read if isinstance(read, torch.Tensor) else torch.from_numpy(read)
    message = f"read {tensor}, and there was {expected}"
    assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), message
    assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, expected))), (
        message
    )


class Held(NamedTuple):
    """A readback, and its expected content."""

    readback: Readback
    expected: list[torch.Tensor]


class Prompt:
    """The tensors of a prompt's logprobs, and their expected content so far."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.expected = [torch.empty_like(tensor) for tensor in tensors]
        self.filled = 0


class Host(RuleBasedStateMachine):
    """Starts, reads and drops readbacks, and checks everything that was read after each rule."""

    @initialize(decisions=DECISIONS)
    def begin(self, decisions: list[int]) -> None:
        self.stack = ExitStack()
        self.device = self.stack.enter_context(installed(Device(cycling(decisions))))
        self.readbacks = Readbacks(CPU, LEAST)
        self.side = torch.cuda.Stream()
        self.held: list[Held] = []
        #: Tensors and arrays that were read, each with its expected content.
        self.views: list[tuple[Any, torch.Tensor]] = []
        self.prompts: list[Prompt] = []
        #: Sources that copies on the side stream may still read.
        self.sources: list[list[torch.Tensor]] = []

    def teardown(self) -> None:
        with self.stack:
            while self.held:
                self.read(0, "all")
            while self.prompts:
                self.fill(0, 9)
            self.device.default.finish()
            self.side.finish()
            self.check()
            assert self.device.strays == 0, "a copy came into memory that was freed"
            assert self.device.stream_waits == 0, "the host waited for a whole stream"

    @invariant()
    def check(self) -> None:
        for view, expected in self.views:
            assert_same(view, expected)

    @rule(
        shapes=st.lists(SHAPES, max_size=4),
        side=st.booleans(),
        fate=st.sampled_from(["kept", "dropped", "overwritten"]),
    )
    def start(self, shapes: list[Shape], side: bool, fate: str) -> None:
        """Start a readback; afterwards keep, drop or overwrite its sources."""
        sources = [random_tensor(*shape) for shape in shapes]
        expected = [source.clone() for source in sources]
        readback = self.readbacks.start(sources, self.side if side else None)
        self.held.append(Held(readback, expected))
        if fate == "kept":
            self.sources.append(sources)
        elif fate == "overwritten" and not side:
            for source in sources:
                poison(source)

    @rule(which=PICK, keep=st.sampled_from(["all", "array row", "tensor row", "nothing"]))
    def read(self, which: int, keep: str) -> None:
        """Wait for a readback, and keep its tensors, or views of single rows, or nothing."""
        if not self.held:
            return
        held = self.held.pop(which % len(self.held))
        held.readback.wait("test")
        for tensor, expected in zip(held.readback.tensors, held.expected, strict=True):
            assert_same(tensor, expected)
            if keep == "all":
                self.views.append((tensor, expected))
            elif keep != "nothing" and expected.ndim and len(expected):
                # NumPy has no bfloat16.
                array = keep == "array row" and tensor.dtype != torch.bfloat16
                self.views.append(((tensor.numpy() if array else tensor)[-1:], expected[-1:]))

    @rule(rows=st.integers(1, 9), width=WIDTHS, chunk=st.integers(1, 4))
    def reserve(self, rows: int, width: int, chunk: int) -> None:
        """Reserve tensors for a prompt's logprobs, and fill the first chunk."""
        shapes = [(rows, width), (rows, width), (rows,)]
        tensors = self.readbacks.reserve(tuple(zip(shapes, PROMPT_DTYPES, strict=True)))
        assert tensors is not None
        self.prompts.append(Prompt(tensors))
        self.fill(len(self.prompts) - 1, chunk)

    @rule(which=PICK, count=st.integers(1, 5))
    def fill(self, which: int, count: int) -> None:
        """Fill a prompt's next chunk, and read all of it after the last one."""
        if not self.prompts:
            return
        prompt = self.prompts[which % len(self.prompts)]
        rows = slice(prompt.filled, min(prompt.filled + count, len(prompt.tensors[0])))
        prompt.filled = rows.stop
        # The device's ids are wider than the host's.
        sources = [random_tensor(each[rows].shape, each.dtype) for each in prompt.tensors]
        sources[0] = sources[0].long()
        for expected, source in zip(prompt.expected, sources, strict=True):
            expected[rows] = source
        assert self.readbacks.fill(prompt.tensors, rows, sources)
        for source in sources:
            poison(source)
        if prompt.filled == len(prompt.tensors[0]):
            event = self.readbacks.event_of(prompt.tensors)
            assert event is not None
            event.synchronize()
            self.views += zip(prompt.tensors, prompt.expected, strict=True)
            self.prompts.remove(prompt)

    @rule(kind=st.sampled_from(["held", "views", "prompts"]), which=PICK)
    def drop(self, kind: str, which: int) -> None:
        """Drop a readback or a prompt, in flight or not, or a view."""
        if items := getattr(self, kind):
            del items[which % len(items)]


@pytest.mark.drawn
def test_the_host_reads_the_devices_values_and_they_stay() -> None:
    """In any order, at any time, whatever becomes of the sources and of other readbacks."""
    few = settings(max_examples=examples(60), stateful_step_count=15)
    run_state_machine_as_test(Host, settings=few)  # type: ignore[no-untyped-call]


@given(
    layouts=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=40),
    at_once=st.integers(1, 4),
    decisions=DECISIONS,
    side=st.booleans(),
)
@draws(40)
def test_there_are_no_more_buffers_than_are_in_use_at_a_time(
    layouts: list[list[Shape]], at_once: int, decisions: list[int], side: bool
) -> None:
    with installed(Device(cycling(decisions))) as device:
        readbacks = Readbacks(CPU, least=1 << 16)
        stream = torch.cuda.Stream() if side else None
        held: list[Readback] = []
        for layout in layouts:
            if len(held) == at_once:
                held.pop(0).wait("test")
            held.append(readbacks.start([random_tensor(*shape) for shape in layout], stream))
        assert device.allocations <= at_once


def test_a_buffer_dropped_in_flight_is_used_again_once_its_copy_has_arrived() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU)
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5
        device.default.finish()
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5


def test_a_readback_larger_than_all_before_gets_a_buffer_of_its_own_size() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU, least=64)
        for exponent in range(12):
            for _ in range(3):
                readbacks.start([random_tensor((1 << exponent,), torch.int64)]).wait("test")
        assert device.allocations == 9  # 64 bytes hold the first four


def test_a_wait_is_a_fence_of_its_owner_for_one_event() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        before = fences.counts().get("test-owner", 0)
        first, second = (readbacks.start([torch.arange(3)]) for _ in range(2))
        assert not first.event.query()
        assert first.wait("test-owner")[0].tolist() == [0, 1, 2]
        assert first.event.query()
        assert not second.event.query()
        first.wait("test-owner")
        assert fences.counts()["test-owner"] == before + 1


def test_tensors_that_were_not_reserved_are_not_filled() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        tensors = [torch.zeros(2)]
        assert not readbacks.fill(tensors, slice(0, 1), [torch.ones(1)])
        assert readbacks.event_of(tensors) is None
        assert tensors[0].tolist() == [0, 0]
