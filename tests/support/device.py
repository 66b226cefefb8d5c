"""A simulated device: pinned memory, streams and events for machines without a GPU.

It makes races deterministic that a real device shows only now and then. Computations run at
once, on the CPU. A non-blocking copy into pinned memory is only queued, and its target holds
:func:`poison` until the copy is executed. A read that is too early, from a buffer handed out
twice, or behind the wrong event therefore returns an obviously wrong value. So does a target of a
non-blocking copy out of pinned memory that the host has written again before the copy is executed.

- A copy on the default stream reads its source at the call: later writes to the source are
  launched later on the same stream.
- A copy on another stream reads its source when it is executed, and keeps it alive only after
  ``record_stream``: a source that is overwritten or freed meanwhile gives wrong data. So does
  a source if the stream has not waited for the default stream since it was last entered.
- A copy out of pinned memory takes effect at the call, for the computations behind it. When it is
  executed, its source must be what it was. It stops the host if its source is not contiguous.
- Operations of one stream are in order. Only ``wait_stream`` and ``wait_event`` order streams.
- ``event.query()`` first lets the device make progress. The test supplies ``decide(n)``, which
  returns a number in ``range(n)``; 0 means no progress. ``synchronize()`` executes what the
  event waits for, and nothing else.

Reads of the device's tensors, as by ``.item()``, are not seen; ``Device.stream_waits`` does not
count them.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple, Optional
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Decide = Callable[[int], int]

_copy = torch.Tensor.copy_
_POISONED_BYTE = 0xAD
_POISONS = {
    **dict.fromkeys((torch.int32, torch.int64), -7_777_777),
    **dict.fromkeys((torch.float32, torch.float64, torch.bfloat16), 7.7e33),
}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a contiguous tensor with a value that no computation gives, and return it."""
    if tensor.dtype in _POISONS:
        return tensor.fill_(_POISONS[tensor.dtype])
    tensor.reshape(-1).view(torch.uint8).fill_(_POISONED_BYTE)
    return tensor


class _Location(NamedTuple):
    """The address and layout of a tensor's data, which does not keep the data alive."""

    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Location":
        storage = StorageWeakRef(tensor.untyped_storage())
        return cls(storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)

    def tensor(self) -> torch.Tensor | None:
        """The tensor at this location; None if it was freed."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            return None
        tensor = torch.empty(0, dtype=self.dtype)
        return tensor.set_(storage, self.offset, self.shape, self.stride)


class _Copy:
    """A queued copy into bytes of pinned memory."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, memory: _Location) -> None:
        self.source = _Location.of(source)
        self.shape = target.shape
        self.dtype = target.dtype
        self.memory = memory
        self.data: torch.Tensor | None = None
        #: Memory that is not reused before this copy is executed.
        self.held: list[torch.UntypedStorage] = []

    def read(self) -> None:
        """Read the source, once; the data may arrive later."""
        if self.data is None:
            source = self.source.tensor()
            if source is None:
                self.lose()
            else:
                self.data = _copy(torch.empty(self.shape, dtype=self.dtype), source)

    def lose(self) -> None:
        """Give up the source: wrong data will arrive."""
        self.data = poison(torch.empty(self.shape, dtype=self.dtype))

    def arrive(self) -> bool:
        """Write the data into the target.

        Returns: False if the target was freed.
        """
        self.read()
        assert self.data is not None
        memory = self.memory.tensor()
        if memory is None:
            return False
        _copy(memory, self.data.reshape(-1).view(torch.uint8))
        return True


class _Upload:
    """A queued copy out of pinned memory, which has taken effect; see the module."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source = _Location.of(source)
        self.target = _Location.of(target)
        self.data = source.clone()

    def reads(self) -> bool:
        """Whether the device reads what was there at the call; wrong data arrives if not."""
        source, target = self.source.tensor(), self.target.tensor()
        same = source is None or torch.equal(_bytes(source), _bytes(self.data))
        if not same and target is not None:
            _copy(target, poison(self.data))
        return same


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Event:
    """A ``torch.Event`` of the simulated device."""

    device: ClassVar["Device"]

    def __new__(cls, *_: Any, **__: Any) -> "Event":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.behind: tuple[Stream, int] | None = None

    def record(self, stream: Optional["Stream"] = None) -> None:
        """Mark the stream's current position."""
        with self.device.lock:
            stream = stream or self.device.current()
            self.behind = (stream, stream.put(None))

    def passed(self) -> bool:
        """Whether the device has reached it; unlike :meth:`query`, this makes no progress."""
        return self.behind is None or self.behind[0].done >= self.behind[1]

    def query(self) -> bool:
        """Let the device make progress; whether it has reached the event."""
        with self.device.lock:
            if not self.passed():
                self.device.progress()
            return self.passed()

    def synchronize(self) -> None:
        """Execute everything that the event waits for."""
        with self.device.lock:
            if self.behind is not None:
                self.behind[0].execute(self.behind[1])

    def wait(self, stream: Optional["Stream"] = None) -> None:
        """Have a stream wait for the event."""
        (stream or self.device.current()).wait_event(self)


class Stream:
    """A ``torch.cuda.Stream`` of the simulated device.

    Attributes:
        queue: operations to execute: a copy, a position of another stream to wait for, or
            None for an event.
        done: number of operations executed so far.
        ordered: whether it has waited for the default stream since it was last entered.
    """

    device: ClassVar["Device"]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.queue: deque[_Copy | _Upload | tuple[Stream, int] | None] = deque()
        self.done = 0
        self.ordered = False
        with self.device.lock:
            self.device.streams.append(self)

    def put(self, operation: "_Copy | _Upload | tuple[Stream, int] | None") -> int:
        """Queue an operation; the position after it."""
        self.queue.append(operation)
        return self.done + len(self.queue)

    def wait_stream(self, other: "Stream") -> None:
        """Wait for everything that is queued on the other stream now."""
        with self.device.lock:
            self._wait(other, other.done + len(other.queue))

    def wait_event(self, event: Event) -> None:
        """Wait for the event."""
        with self.device.lock:
            if event.behind is not None:
                self._wait(*event.behind)

    def _wait(self, other: "Stream", place: int) -> None:
        if other is self:
            return
        self.put((other, place))
        self.ordered |= other is self.device.default
        if self is self.device.default:
            # Computations from now on come after the other stream's reads.
            other.read(place)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the current position."""
        event = event or self.device.Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Let the device make progress; whether everything launched is done."""
        with self.device.lock:
            self.device.progress()
            return not self.queue

    def synchronize(self) -> None:
        """Execute everything launched, with the host waiting."""
        with self.device.lock:
            self.device.stream_waits += 1
            self.finish()

    def finish(self) -> None:
        """Execute everything launched, without counting a wait of the host."""
        self.execute(self.done + len(self.queue))

    def read(self, place: int) -> None:
        """Read the sources of all copies up to a position."""
        for operation in list(self.queue)[: max(0, place - self.done)]:
            if isinstance(operation, _Copy):
                operation.read()
            elif isinstance(operation, tuple):
                operation[0].read(operation[1])

    def able(self) -> bool:
        """Whether the next operation exists and waits for no other stream."""
        if not self.queue:
            return False
        first = self.queue[0]
        return not isinstance(first, tuple) or first[0].done >= first[1]

    def execute(self, place: int) -> None:
        """Execute everything up to a position, and what that waits for."""
        while self.done < place:
            operation = self.queue.popleft()
            if isinstance(operation, _Copy):
                self.device.strays += not operation.arrive()
            elif isinstance(operation, _Upload):
                self.device.rewritten += not operation.reads()
            elif operation is not None:
                operation[0].execute(operation[1])
            self.done += 1


class Device:
    """The simulated device.

    Args:
        decide: ``decide(n)`` returns a number in ``range(n)``: the stream that makes
            progress, or the number of operations.

    Attributes:
        copies: number of copies queued.
        uploads: bytes of each copy out of pinned memory.
        stream_waits: number of waits of the host for a whole stream.
        allocations: number of allocations of pinned memory.
        strays: number of copies whose target was freed before they arrived.
        rewritten: number of copies out of pinned memory whose source was written again before
            they were executed.
    """

    def __init__(self, decide: Decide) -> None:
        self.decide = decide
        self.copies = self.stream_waits = self.allocations = self.strays = 0
        self.rewritten = 0
        self.uploads: list[int] = []
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.Event = type("Event", (Event,), {"device": self})
        self.Stream = type("Stream", (Stream,), {"device": self})
        self.default: Stream = self.Stream()
        self._thread = threading.local()
        self._pinned: list[tuple[int, int, StorageWeakRef]] = []

    def current(self, _: Any = None) -> Stream:
        """The calling thread's stream."""
        stream: Stream = getattr(self._thread, "stream", self.default)
        return stream

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Make ``stream`` the calling thread's current stream."""
        before = self.current()
        self._thread.stream = stream or before
        try:
            yield
        finally:
            self.current().ordered = False
            self._thread.stream = before

    def progress(self) -> None:
        """Execute some operations of one stream, as decided."""
        able = [stream for stream in self.streams if stream.able()]
        if not able:
            return
        stream = able[self.decide(len(able))]
        for _ in range(self.decide(len(stream.queue) + 1)):
            if stream.able():
                stream.execute(stream.done + 1)

    def synchronize(self, _: Any = None) -> None:
        """Wait for all streams."""
        with self.lock:
            self.stream_waits += 1
            for stream in self.streams:
                stream.finish()

    def allocate(self, size: int) -> torch.Tensor:
        """Allocate pinned host memory, uint8 [size]."""
        with self.lock:
            self.allocations += 1
            memory = poison(torch.empty(size, dtype=torch.uint8))
            start, storage = memory.data_ptr(), StorageWeakRef(memory.untyped_storage())
            self._pinned = [each for each in self._pinned if not each[2].expired()]
            self._pinned.append((start, start + size, storage))
            return memory

    def copy(self, target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        """``torch.Tensor.copy_``; asynchronous into pinned memory if non-blocking."""
        into, out_of = self._memory(target), self._memory(source)
        if into is None and out_of is None:
            return _copy(target, source, non_blocking)
        with self.lock:
            stream = self.current()
            if into is None and non_blocking and source.is_contiguous():
                self._upload(stream, target, source)
                return target
            if into is None or not non_blocking or not target.is_contiguous():
                self.stream_waits += 1
                stream.finish()
                return _copy(target, source)
            if target.numel():
                copy = _Copy(source, target, into)
                if stream is self.default:
                    copy.read()
                elif not stream.ordered:
                    copy.lose()
                poison(target)
                stream.put(copy)
                self.copies += 1
            return target

    def _upload(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy out of pinned memory, behind the stream's copies into that memory."""
        storage = StorageWeakRef(source.untyped_storage())
        if any(isinstance(each, _Copy) and each.memory.storage == storage for each in stream.queue):
            stream.finish()
        _copy(target, source)
        self.uploads.append(source.nbytes)
        if source.numel():
            stream.put(_Upload(source, target))

    def _memory(self, tensor: Any) -> _Location | None:
        """The location of a tensor's bytes; None if it is not in pinned memory."""
        if not isinstance(tensor, torch.Tensor) or not self._pinned:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a compiler's tensor has no data
            return None
        for start, end, storage in self._pinned:
            if start <= address < end and not storage.expired():
                size = torch.Size([tensor.nbytes])
                return _Location(storage, address - start, size, (1,), torch.uint8)
        return None

    def stand_ins(self) -> list[tuple[Any, str, Any]]:
        """The attributes that the device replaces: owner, name and replacement."""

        def copy_(target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
            return self.copy(target, source, non_blocking)

        def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
            for operation in stream.queue:
                if isinstance(operation, _Copy):
                    operation.held.append(tensor.untyped_storage())

        replaced = [
            (torch.Tensor, "record_stream", record_stream),
            (torch, "Event", self.Event),
            (torch.cuda, "Event", self.Event),
            (torch.cuda, "Stream", self.Stream),
            (torch.cuda, "current_stream", self.current),
            (torch.cuda, "stream", self.on),
            (torch.cuda, "synchronize", self.synchronize),
            (torch.Tensor, "copy_", copy_),
        ]
        try:
            from vllm.v1.readiness.engine import pinning
            from vllm.v1.readiness.outputs import readback
        except ModuleNotFoundError:  # an installation without the overlay
            return replaced
        events = (readback, "has_events", lambda _: True)
        return [*replaced, events, (pinning, "allocate", self.allocate)]


def install(device: Device) -> None:
    """Give this process the device, permanently."""
    for owner, name, stand_in in device.stand_ins():
        setattr(owner, name, stand_in)


@contextmanager
def installed(device: Device) -> Iterator[Device]:
    """Give this process the device within the context."""
    with ExitStack() as stack:
        for owner, name, stand_in in device.stand_ins():
            stack.enter_context(patch.object(owner, name, stand_in))
        yield device
