"""Readbacks on a simulated device: what the host reads is what the device had.

The device draws when copies arrive. The oracle is a clone of each source, taken as its
readback starts. The property is only as good as what it catches, so that the same property
must fail with each of several planted faults.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from support.asynchronous import cycling
from support.device import Device, installed, poison
from support.mutants import MUTANTS, mutated
from vllm.v1.readiness import fences
from vllm.v1.readiness.readback import Readback, Readbacks

CPU = torch.device("cpu")
LEAST = 2048
DTYPES = [
    torch.int32,
    torch.int64,
    torch.float32,
    torch.uint8,
    torch.bfloat16,
    torch.bool,
]
PROMPT_DTYPES = [torch.int32, torch.float32, torch.int32]
_chance = itertools.count()

Shape = tuple[tuple[int, ...], torch.dtype]


class Start(NamedTuple):
    """Start a readback, and afterwards overwrite, let go of or keep its sources."""

    shapes: list[Shape]
    side: bool
    fate: str


class Read(NamedTuple):
    """Wait for a readback that is held, and keep it or views of single rows alone."""

    which: int
    keep: str


class Drop(NamedTuple):
    """Drop a readback, in flight or not."""

    which: int


class Forget(NamedTuple):
    """Drop a view."""

    which: int


class Prompt(NamedTuple):
    """Make room for a prompt's logprobs, and bring the first chunk."""

    rows: int
    width: int
    chunk: int


class Chunk(NamedTuple):
    """Bring a prompt's next chunk, and read all of it where it ends."""

    which: int
    rows: int


class Leave(NamedTuple):
    """Drop a prompt, chunks in flight or not."""

    which: int


Operation = Start | Read | Drop | Forget | Prompt | Chunk | Leave
Schedule = tuple[list[Operation], list[int]]

PICK = st.integers(0, 5)
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
STARTS = st.builds(
    Start,
    st.lists(SHAPES, max_size=4),
    st.booleans(),
    st.sampled_from(["kept", "let go", "overwritten"]),
)
READS = st.builds(Read, PICK, st.sampled_from(["all", "array row", "tensor row", "nothing"]))
OPERATIONS = st.lists(
    st.one_of(
        STARTS,
        STARTS,
        READS,
        READS,
        st.builds(Drop, PICK),
        st.builds(Forget, PICK),
        st.builds(Prompt, st.integers(1, 9), WIDTHS, st.integers(1, 4)),
        st.builds(Chunk, PICK, st.integers(1, 5)),
        st.builds(Chunk, PICK, st.integers(1, 5)),
        st.builds(Leave, PICK),
    ),
    max_size=30,
)
SCHEDULES = st.tuples(OPERATIONS, st.lists(st.integers(0, 5), max_size=12))


def drawn(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Random data, another each time."""
    generator = torch.Generator().manual_seed(next(_chance))
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    highest = 2 if dtype == torch.bool else 150
    return torch.randint(0, highest, tuple(shape), generator=generator).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equality of shape, dtype and every byte, whatever a dtype makes of them."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    return bool(torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (found, expected))))


class Held(NamedTuple):
    """A readback and what must come of it."""

    readback: Readback
    expected: list[torch.Tensor]


class Room:
    """A prompt's tensors, and what must come of them so far."""

    def __init__(self, tensors: list[torch.Tensor], rows: int) -> None:
        self.tensors = tensors
        self.expected = [torch.empty_like(tensor) for tensor in tensors]
        self.rows = rows
        self.filled = 0


class Host:
    """Does what it is told, and checks all that it has read after each operation."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.readbacks = Readbacks(CPU, LEAST)
        self.side = torch.cuda.Stream()
        self.held: list[Held] = []
        #: What was read and is kept, beside what it must stay.
        self.views: list[tuple[Any, torch.Tensor]] = []
        self.rooms: list[Room] = []
        #: Sources that copies on the side stream may still read.
        self.sources: list[list[torch.Tensor]] = []

    def run(self, operations: Sequence[Operation]) -> None:
        """Do everything, and in the end read everything."""
        for operation in operations:
            getattr(self, type(operation).__name__.lower())(operation)
            self.check()
        while self.held:
            self.read(Read(0, "all"))
        while self.rooms:
            self.chunk(Chunk(0, self.rooms[0].rows))
        self.device.default.finish()
        self.side.finish()
        self.check()
        assert self.device.strays == 0, "a copy came into memory that was freed"
        assert self.device.stream_waits == 0, "the host waited for a whole stream"

    def check(self) -> None:
        """What was read stays what it was."""
        for view, expected in self.views:
            found = view if isinstance(view, torch.Tensor) else torch.from_numpy(view)
            assert same(found, expected), f"read {found}, and there was {expected}"

    def start(self, told: Start) -> None:
        sources = [drawn(*shape) for shape in told.shapes]
        expected = [source.clone() for source in sources]
        readback = self.readbacks.start(sources, self.side if told.side else None)
        self.held.append(Held(readback, expected))
        if told.fate == "kept":
            self.sources.append(sources)
        elif told.fate == "overwritten" and not told.side:
            for source in sources:
                poison(source)

    def read(self, told: Read) -> None:
        if not self.held:
            return
        held = self.held.pop(told.which % len(self.held))
        held.readback.wait("test")
        for tensor, expected in zip(held.readback.tensors, held.expected, strict=True):
            assert same(tensor, expected), f"read {tensor}, and there was {expected}"
            if told.keep == "all":
                self.views.append((tensor, expected))
            elif told.keep != "nothing" and expected.ndim and len(expected):
                # NumPy has no bfloat16.
                array = told.keep == "array row" and tensor.dtype != torch.bfloat16
                self.views.append(((tensor.numpy() if array else tensor)[-1:], expected[-1:]))

    def drop(self, told: Drop) -> None:
        if self.held:
            del self.held[told.which % len(self.held)]

    def forget(self, told: Forget) -> None:
        if self.views:
            del self.views[told.which % len(self.views)]

    def prompt(self, told: Prompt) -> None:
        shapes = [(told.rows, told.width), (told.rows, told.width), (told.rows,)]
        layout = tuple(zip(shapes, PROMPT_DTYPES, strict=True))
        tensors = self.readbacks.reserve(layout)
        assert tensors is not None
        self.rooms.append(Room(tensors, told.rows))
        self.chunk(Chunk(len(self.rooms) - 1, told.chunk))

    def chunk(self, told: Chunk) -> None:
        if not self.rooms:
            return
        at = told.which % len(self.rooms)
        room = self.rooms[at]
        rows = slice(room.filled, min(room.filled + told.rows, room.rows))
        room.filled = rows.stop
        # The device's ids are wider than the host's.
        sources = [drawn(each[rows].shape, each.dtype) for each in room.tensors]
        sources[0] = sources[0].long()
        for expected, source in zip(room.expected, sources, strict=True):
            expected[rows] = source
        assert self.readbacks.fill(room.tensors, rows, sources)
        for source in sources:
            poison(source)
        if room.filled == room.rows:
            event = self.readbacks.event_of(room.tensors)
            assert event is not None
            event.synchronize()
            self.views += zip(room.tensors, room.expected, strict=True)
            del self.rooms[at]

    def leave(self, told: Leave) -> None:
        if self.rooms:
            del self.rooms[told.which % len(self.rooms)]


def what_is_read_is_what_there_was(schedule: Schedule) -> None:
    """The property."""
    operations, decisions = schedule
    with installed(Device(cycling(decisions))) as device:
        Host(device).run(operations)


@given(SCHEDULES)
@settings(max_examples=400)
def test_what_is_read_is_what_there_was_and_stays_so(schedule: Schedule) -> None:
    """In any order, at any time, whatever becomes of the sources and of other readbacks."""
    what_is_read_is_what_there_was(schedule)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_property_finds_a_planted_fault(name: str) -> None:
    """It shows as a wrong value, and without help from shrinking."""
    fails = settings(
        max_examples=2000,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )(given(SCHEDULES)(what_is_read_is_what_there_was))
    with mutated(name), pytest.raises(AssertionError, match="and there was"):
        fails()


@pytest.mark.parametrize("name", ["read early", "reused in flight", "event before the copies"])
def test_a_fault_shrinks_to_a_few_operations(name: str) -> None:
    def wrong(schedule: Schedule) -> bool:
        try:
            what_is_read_is_what_there_was(schedule)
        except AssertionError:
            return True
        return False

    fixed = settings(max_examples=1000, derandomize=True, database=None)
    with mutated(name):
        operations, decisions = find(SCHEDULES, wrong, settings=fixed)
    assert len(operations) <= 4
    assert len(decisions) <= 3


@given(
    layouts=st.lists(st.lists(SHAPES, min_size=1, max_size=4), min_size=1, max_size=40),
    at_once=st.integers(1, 4),
    decisions=st.lists(st.integers(0, 5), max_size=8),
    side=st.booleans(),
)
@settings(max_examples=100)
def test_there_are_as_many_buffers_as_are_in_use_at_a_time(
    layouts: list[list[Shape]], at_once: int, decisions: list[int], side: bool
) -> None:
    with installed(Device(cycling(decisions))) as device:
        readbacks = Readbacks(CPU, least=1 << 16)
        stream = torch.cuda.Stream() if side else None
        held: list[Readback] = []
        for layout in layouts:
            if len(held) == at_once:
                held.pop(0).wait("test")
            held.append(readbacks.start([drawn(*shape) for shape in layout], stream))
        assert device.allocations <= at_once


def test_what_was_dropped_in_flight_is_used_again_once_it_has_arrived() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU)
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5
        device.default.finish()
        for _ in range(5):
            readbacks.start([torch.arange(9)])
        assert device.allocations == 5


def test_a_larger_one_than_all_before_gets_a_buffer_of_its_own_size() -> None:
    with installed(Device(cycling([]))) as device:
        readbacks = Readbacks(CPU, least=64)
        for exponent in range(12):
            source = drawn((1 << exponent,), torch.int64)
            for _ in range(3):
                readback = readbacks.start([source])
                readback.wait("test")
                assert same(readback.tensors[0], source)
                del readback
        assert device.allocations == 9  # 64 bytes hold the first four


def test_a_wait_is_a_fence_of_its_owner_and_for_one_event() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        before = fences.counts().get("test-owner", 0)
        first, second = (readbacks.start([torch.arange(3)]) for _ in range(2))
        assert not first.ready()
        assert (first.read("test-owner")[0] == [0, 1, 2]).all()
        assert first.ready()
        assert not second.ready()
        first.wait("test-owner")
        assert fences.counts()["test-owner"] == before + 1


def test_tensors_of_others_are_not_filled() -> None:
    with installed(Device(cycling([]))):
        readbacks = Readbacks(CPU)
        tensors = [torch.zeros(2)]
        assert not readbacks.fill(tensors, slice(0, 1), [torch.ones(1)])
        assert readbacks.event_of(tensors) is None
        assert tensors[0].tolist() == [0, 0]


def test_without_events_the_same_is_copied_at_once() -> None:
    readbacks = Readbacks(CPU)
    sources = [drawn((3, 21), torch.float32), drawn((0, 4), torch.bool)]
    expected = [source.clone() for source in sources]
    readback = readbacks.start(sources)
    for source in sources:
        poison(source)
    assert readback.ready()
    readback.wait("test")
    assert all(map(same, readback.tensors, expected))
    rooms = readbacks.reserve((((3, 2), torch.int64),))
    assert rooms is not None
    (room,) = rooms
    assert room.shape == (3, 2)
    assert not readbacks.fill([room], slice(0, 3), [torch.zeros(3, 2)])  # upstream copies


class TestTheSimulatedDevice:
    """The instrument that the rest is measured with."""

    @pytest.fixture(autouse=True)
    def device(self) -> Iterator[Device]:
        with installed(Device(cycling([]))) as device:
            yield device

    def queued(self, device: Device, source: torch.Tensor) -> torch.Tensor:
        """What a copy is queued into."""
        size = max(source.nbytes, 1)
        target = device.allocate(size)[: source.nbytes].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        return target

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_read_before_completion_gives_poison(
        self, device: Device, dtype: torch.dtype
    ) -> None:
        source = drawn((3, 2), dtype)
        target = self.queued(device, source)
        event = torch.Event()
        event.record()
        assert not event.query()
        assert same(target, poison(torch.empty_like(source)))
        event.synchronize()
        assert same(target, source)

    def test_what_overwrites_the_source_on_the_same_stream_comes_later(
        self, device: Device
    ) -> None:
        source = torch.arange(4)
        target = self.queued(device, source)
        source.zero_()
        device.default.finish()
        assert target.tolist() == [0, 1, 2, 3]

    def test_a_source_that_is_overwritten_under_another_stream_shows(self, device: Device) -> None:
        source = torch.arange(4)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            side.wait_stream(device.default)
            target = self.queued(device, source)
        source.zero_()
        side.synchronize()
        assert target.tolist() == [0, 0, 0, 0]

    def test_unless_the_stream_that_overwrites_it_waits(self, device: Device) -> None:
        source = torch.arange(4)
        side = torch.cuda.Stream()
        side.wait_stream(device.default)
        with torch.cuda.stream(side):
            target = self.queued(device, source)
        torch.cuda.current_stream().wait_stream(side)
        source.zero_()
        assert target[0] != 0  # nor has it arrived
        device.default.finish()
        assert target.tolist() == [0, 1, 2, 3]

    def test_a_source_that_dies_under_another_stream_shows(self, device: Device) -> None:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            side.wait_stream(device.default)
            target = self.queued(device, torch.arange(4))
        side.finish()
        assert same(target, poison(torch.empty_like(target)))

    def test_a_source_that_the_stream_did_not_wait_for_shows(self, device: Device) -> None:
        source = torch.arange(4)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            target = self.queued(device, source)
        side.finish()
        assert same(target, poison(torch.empty_like(target)))

    def test_a_stream_is_in_order_and_independent_of_others(self, device: Device) -> None:
        side = torch.cuda.Stream()
        events = [torch.Event() for _ in range(4)]
        for event, stream in zip(events, [None, side, None, side], strict=True):
            event.record(stream)
        events[2].synchronize()
        assert [event.passed() for event in events] == [True, False, True, False]
        events[3].synchronize()
        assert all(event.passed() for event in events)

    def test_a_stream_that_waits_is_behind_the_other(self, device: Device) -> None:
        side = torch.cuda.Stream()
        first, second = torch.Event(), torch.Event()
        first.record()
        side.wait_event(first)
        second.record(side)
        second.synchronize()
        assert first.passed()

    def test_an_event_that_was_never_recorded_is_complete(self) -> None:
        assert torch.Event().query()

    def test_the_device_goes_on_as_far_as_is_decided(self, device: Device) -> None:
        device.decide = cycling([0, 1])
        events = [torch.Event() for _ in range(3)]
        for event in events:
            event.record()
        answers = [events[2].query() for _ in range(3)]
        assert answers == [False, False, True]

    def test_waits_for_whole_streams_are_counted(self, device: Device) -> None:
        target = self.queued(device, torch.arange(3))
        assert device.stream_waits == 0
        target.copy_(torch.arange(3))
        target[::2].copy_(torch.arange(2), non_blocking=True)  # not contiguous
        torch.cuda.synchronize()
        assert device.stream_waits == 3

    def test_a_copy_into_memory_that_was_freed_is_counted(self, device: Device) -> None:
        self.queued(device, torch.arange(3))
        device.default.finish()
        assert device.strays == 1


def test_all_is_put_back() -> None:
    before = (torch.Event, torch.cuda.Stream, torch.cuda.stream, torch.Tensor.copy_)
    with installed(Device(cycling([]))):
        assert torch.Tensor.copy_ is not before[-1]
    assert (torch.Event, torch.cuda.Stream, torch.cuda.stream, torch.Tensor.copy_) == before
    assert "copy_" not in vars(torch.Tensor)
    assert not Readbacks(CPU).events


def test_sources_live_until_they_are_copied_though_the_readback_is_dropped() -> None:
    with installed(Device(lambda n: 0)) as device:
        stream = torch.cuda.Stream()
        readbacks = Readbacks(CPU, LEAST)
        readback = readbacks.start([torch.arange(5)], stream)
        (tensor,), event = readback.tensors, readback.event
        del readback
        assert event is not None
        event.synchronize()
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert device.copies == 1
