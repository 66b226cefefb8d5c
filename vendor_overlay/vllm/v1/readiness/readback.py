"""Readback: one way from the device to the host, and one event to wait for.

Tensors that the host is to see travel together into one pinned buffer, and the host waits
for the event behind them: not for the stream, whose later work is none of its business,
and not for other streams (the idea of vLLM pull request 22760, there for sampled ids).

On CUDA, what is small is not copied but stored into the pinned buffer by a kernel. The
copy engine serves one direction in order, whatever the streams and their priorities, so
that a copy of a few kilobytes waits for every gigabyte that a KV connector is moving at
the time. A store waits for no engine.

A buffer is free again when nothing on the host refers to what it holds, and the copy into
it has arrived. There are as many as are in use at a time.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.readiness import fences

#: Offsets in a buffer are multiples of this many bytes: whole cache lines.
_ALIGNMENT = 64
#: Up to so many bytes are stored by a kernel; more would keep it too long on the device.
_STORED = 1 << 20

#: What numpy has a type for.
_NUMPY = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}

Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
Store = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def has_events(device: torch.device) -> bool:
    """Whether copies from ``device`` need not block, and there is something to wait for."""
    known = current_platform.is_cuda_alike() or current_platform.is_xpu()
    return known and device.type != "cpu" and bool(is_pin_memory_available())


def allocate(size: int) -> torch.Tensor:
    """Pinned host memory, uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class Readback:
    """What one call of :meth:`Readbacks.start` brings to the host.

    Attributes:
        tensors: on the host, shaped and typed as the sources; valid once ready, and as
            long as anything refers to them or to views of them.
        event: recorded behind the copies; None: there is nothing to wait for.
    """

    __slots__ = ("event", "tensors")

    def __init__(self, tensors: list[torch.Tensor], event: torch.Event | None) -> None:
        self.tensors = tensors
        self.event = event

    def ready(self) -> bool:
        """Whether everything has arrived; asks the event, and waits for nothing."""
        return self.event is None or self.event.query()

    def wait(self, owner: str) -> None:
        """Wait until everything has arrived, in the name of ``owner``."""
        if self.event is not None:
            fences.wait(self.event, owner)

    def read(self, owner: str) -> list[np.ndarray]:
        """The tensors as arrays, waiting for them in the name of ``owner``.

        Raises:
            TypeError: numpy has no such dtype (bfloat16); :attr:`tensors` has the values.
        """
        self.wait(owner)
        return [tensor.numpy() for tensor in self.tensors]


class _Buffer:
    """Pinned memory, and the event behind the newest copy into it."""

    __slots__ = ("event", "lease", "memory")

    def __init__(self, size: int) -> None:
        self.memory = allocate(size)
        self.event: torch.Event | None = None
        self.lease: _Lease | None = None

    def arrived(self) -> bool:
        return self.event is None or self.event.query()


class _Lease(weakref.ref[np.ndarray]):
    """Tells the pool when nothing refers to a buffer's content any more."""

    __slots__ = ("buffer", "free")

    def __init__(
        self,
        root: np.ndarray,
        ended: Callable[["_Lease"], None],
        buffer: _Buffer,
        free: list[_Buffer],
    ) -> None:
        super().__init__(root, ended)  # type: ignore[call-arg]
        self.buffer = buffer
        self.free = free

    def __new__(cls, root: np.ndarray, ended: Callable[["_Lease"], None], *_: object) -> "_Lease":
        return super().__new__(cls, root, ended)


def _ended(lease: _Lease) -> None:
    """The host is done with what the buffer holds."""
    lease.free.append(lease.buffer)


@lru_cache(maxsize=256)
def _places(layout: Layout) -> tuple[int, tuple[int, ...]]:
    """How many bytes a layout takes, and at which byte each tensor begins."""
    starts = []
    size = 0
    for shape, dtype in layout:
        starts.append(size)
        size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return size, tuple(starts)


class Readbacks:
    """The buffers of one runner, and the copies into them.

    Not thread-safe, but for one thing: what was read may be let go of in any thread.

    Args:
        device: where the tensors come from.
        least: bytes of the smallest buffer; what a step is expected to need.
        most: bytes of all buffers, beyond which :meth:`reserve` makes no more.
    """

    def __init__(self, device: torch.device, least: int = 4096, most: int = 1 << 30) -> None:
        self.device = device
        self.least = least
        self.most = most
        self._pinned = 0
        self.events = has_events(device)
        self._free: dict[int, list[_Buffer]] = {}
        #: All there are, by the address of their memory.
        self._buffers: dict[int, _Buffer] = {}
        self._store: Store | None = None
        if self.events and current_platform.is_cuda():
            from vllm.v1.readiness import readback_kernels

            self._store = readback_kernels.store

    def warm_up(self, buffers: int) -> None:
        """Pin the first buffers and compile the kernel, which would stall a first step."""
        if not self.events:
            return
        held = [self.reserve((((self.least,), torch.uint8),)) for _ in range(buffers)]
        del held
        zeros = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.start([zeros]).wait(fences.WARM_UP)

    def start(
        self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream | None = None
    ) -> Readback:
        """Start the copies of some tensors, behind what the current stream has been given.

        Args:
            sources: on the device, of any shapes and dtypes. The caller need not keep them:
                their memory is not used again before the copies are done.
            stream: where to put copies that are too large to be stored, so that the
                current stream does not wait for them; the caller then leaves the sources
                unchanged until they are done. None: the current stream.
        """
        if not self.events:
            return Readback([source.clone() for source in sources], None)
        kept = [source.contiguous() for source in sources]
        tensors, buffer = self._room(tuple([(source.shape, source.dtype) for source in kept]))
        if stream is None or self._stored(kept, tensors):
            self._copy(kept, tensors, buffer)
        else:
            current = torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                stream.wait_stream(current)
                self._copy(kept, tensors, buffer)
            for source in kept:
                if source.device.type == self.device.type:
                    source.record_stream(stream)
        return Readback(tensors, buffer.event)

    def reserve(self, layout: Layout) -> list[torch.Tensor] | None:
        """Room for tensors that :meth:`fill` brings piece by piece.

        Args:
            layout: shape and dtype of each.

        Returns:
            The tensors, or None if there is as much pinned memory as there may be.
        """
        if not self.events:
            return [torch.empty(shape, dtype=dtype) for shape, dtype in layout]
        size = self._size(_places(layout)[0])
        if not self._free.get(size) and self._pinned + size > self.most:
            return None
        return self._room(layout)[0]

    def fill(
        self,
        tensors: Sequence[torch.Tensor],
        rows: slice,
        sources: Sequence[torch.Tensor],
    ) -> bool:
        """Start copies into some rows of what :meth:`reserve` has made room for.

        Args:
            tensors: all that there is room for, in their order; the first is not empty.
            rows: which rows of each.
            sources: on the device, as many rows of each; converted where dtypes differ.
                The current stream made them, and reads them before it reuses their memory.

        Returns:
            True if started; False if the tensors are not of a readback.
        """
        buffer = self._buffers.get(tensors[0].data_ptr())
        if buffer is None:
            return False
        targets = [tensor[rows] for tensor in tensors]
        pairs = zip(sources, targets, strict=True)
        self._copy([s.to(t.dtype).contiguous() for s, t in pairs], targets, buffer)
        return True

    def event_of(self, tensors: Sequence[torch.Tensor]) -> torch.Event | None:
        """The event behind the newest copy into a readback's tensors; None: not of one."""
        buffer = self._buffers.get(tensors[0].data_ptr())
        return None if buffer is None else buffer.event

    def _room(self, layout: Layout) -> tuple[list[torch.Tensor], _Buffer]:
        """A buffer, and tensors in it; it is taken until nothing refers to any of them."""
        size, starts = _places(layout)
        buffer, free = self._take(size)
        # Whatever is made of the memory refers to this array, and nothing else does.
        root = buffer.memory.numpy()
        buffer.lease = _Lease(root, _ended, buffer, free)
        tensors = []
        for start, (shape, dtype) in zip(starts, layout, strict=True):
            if (like := _NUMPY.get(dtype)) is not None:
                array = np.ndarray(shape, like, root, start)
                tensors.append(torch.from_numpy(array))
            else:
                end = start + prod(shape) * dtype.itemsize
                tensors.append(torch.from_numpy(root[start:end]).view(dtype).view(shape))
        return tensors, buffer

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start one copy into pinned memory of the caller's, who records the event.

        Args:
            target: contiguous; dtypes may differ.
            source: on the device; as for :meth:`fill`.
        """
        self._launch([source.to(target.dtype).contiguous()], [target])

    def _copy(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], buffer: _Buffer
    ) -> None:
        self._launch(sources, targets)
        buffer.event = torch.Event()
        buffer.event.record()

    def _launch(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if self._stored(sources, targets):
            assert self._store is not None
            self._store(sources, targets)
        else:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)

    def _stored(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
        """Whether a kernel stores them; else they are copied, or refused, by torch."""
        return (
            self._store is not None
            and sum(source.nbytes for source in sources) <= _STORED
            and all(source.is_cuda for source in sources)
            and all(s.shape == t.shape for s, t in zip(sources, targets, strict=True))
        )

    def _size(self, size: int) -> int:
        """The size of the buffers that hold ``size`` bytes: a power of two."""
        return 1 << (max(size, self.least) - 1).bit_length()

    def _take(self, size: int) -> tuple[_Buffer, list[_Buffer]]:
        """A buffer of ``size`` bytes or more that nobody uses, and where it is given back."""
        size = self._size(size)
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = []
        # Only this thread takes, so that what is there stays there.
        for at in range(len(free) - 1, -1, -1):
            if free[at].arrived():
                buffer = free.pop(at)
                break
        else:
            buffer = _Buffer(size)
            self._buffers[buffer.memory.data_ptr()] = buffer
            self._pinned += size
        buffer.event = None
        return buffer, free
