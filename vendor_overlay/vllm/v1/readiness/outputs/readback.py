"""Readbacks: copies from the device to the host, each with one event to wait for.

The tensors of a step share one pinned buffer, and the host waits for the event after their copies,
but not for later work or for other streams. (vLLM pull request 22760 does the same for sampled
token ids.)

On CUDA, a kernel stores small tensors into the pinned buffer, because the copy engine serves all
copies of one direction in order, regardless of streams and priorities: a copy of a few kilobytes
would wait for every gigabyte that a KV connector is moving.

A buffer is free again when the copy into it has completed and the host holds no reference to its
content. Buffers are added on demand.
"""

# mirrors: nothing

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import fences, gauges, pinning

#: Alignment of offsets in a buffer, in bytes: a cache line.
_ALIGNMENT = 64
#: Maximum bytes that the kernel stores; more would occupy the device for too long.
_MAX_STORED = 1 << 20
_NUMPY_TYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}

#: Shape and dtype of each tensor.
Layout = tuple[tuple[tuple[int, ...], torch.dtype], ...]
#: Function that starts copies of sources into targets of the same shapes.
Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


def has_events(device: torch.device) -> bool:
    """Return whether ``device`` supports non-blocking copies and events."""
    supported = current_platform.is_cuda_alike() or current_platform.is_xpu()
    return supported and device.type != "cpu" and bool(is_pin_memory_available())


class Readback(NamedTuple):
    """Tensors on their way to the host."""

    #: On the host, with the shapes and dtypes of the sources. Valid once the event has completed,
    #: while any of the tensors or their views is referenced.
    tensors: list[torch.Tensor]
    event: torch.Event  # recorded after the copies

    def wait(self, owner: str) -> list[torch.Tensor]:
        """Wait for the event and return the tensors; ``owner`` names the fence."""
        fences.wait(self.event, owner)
        return self.tensors


class Buffer:
    """Pinned memory, uint8 [size], with the event after the newest copy to or from it."""

    __slots__ = ("event", "lease", "memory")

    def __init__(self, size: int) -> None:
        self.memory = pinning.allocate(size)
        self.event: torch.Event | None = None
        #: Frees the buffer when its content is no longer referenced.
        self.lease: weakref.ref[np.ndarray] | None = None

    def arrived(self) -> bool:
        """Return whether the newest copy has completed."""
        return self.event is None or bool(self.event.query())

    def mark_copied(self) -> None:
        """Record a new event in the current stream, after a copy."""
        self.event = torch.Event()
        self.event.record()


@lru_cache(maxsize=256)
def _offsets(layout: Layout) -> tuple[int, tuple[int, ...]]:
    """Return the size of a layout and the offset of each tensor, in bytes."""
    offsets = []
    size = 0
    for shape, dtype in layout:
        offsets.append(size)
        size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return size, tuple(offsets)


class Readbacks:
    """Buffers of one runner, and the copies into them.

    Not thread-safe, except that any thread may drop its references to tensors.

    Args:
        device: a device for which :func:`has_events` is true.
        least: minimum size of a buffer in bytes; the expected need of a step.
        most: maximum total bytes of pinned memory that :meth:`reserve` may allocate.
    """

    def __init__(self, device: torch.device, least: int = 4096, most: int = 1 << 30) -> None:
        self.device = device
        self.least = least
        self.most = most
        self._pinned = 0
        self._free: dict[int, list[Buffer]] = {}
        #: All buffers, by address.
        self._buffers: dict[int, Buffer] = {}
        self._store: Copy | None = None
        if current_platform.is_cuda():
            from vllm.v1.readiness.kernels.readback import store

            self._store = store
        gauges.watch(self)

    def held(self) -> Iterator[gauges.Value]:
        """Yield the pinned memory of all buffers."""
        yield gauges.Value(gauges.PINNED_BYTES, (registry.READBACK,), self._pinned)

    def warm_up(self, buffers: int) -> None:
        """Pin ``buffers`` buffers of the minimum size, and compile the kernel."""
        reserved = [self.reserve((((self.least,), torch.uint8),)) for _ in range(buffers)]
        del reserved  # only now, so that the buffers are distinct
        zeros = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.start([zeros]).wait(fences.WARM_UP)

    def start(
        self, sources: Sequence[torch.Tensor], stream: torch.cuda.Stream | None = None
    ) -> Readback:
        """Start copies of tensors, after the work of the current stream.

        Args:
            sources: tensors on the device. The caller may drop them: their memory is not reused
                before the copies have completed.
            stream: stream for copies that the kernel does not serve (None: the current stream). The
                current stream does not wait for them, and must not overwrite the sources.
        """
        contiguous = [source.contiguous() for source in sources]
        layout = tuple([(source.shape, source.dtype) for source in contiguous])
        tensors, buffer = self._allocate(layout)
        copy = self._choose_copy(contiguous, tensors)
        if stream is None or copy is self._store:
            self._copy(copy, contiguous, tensors, buffer)
        else:
            current = torch.cuda.current_stream()
            with torch.cuda.stream(stream):
                stream.wait_stream(current)
                self._copy(copy, contiguous, tensors, buffer)
            for source in contiguous:
                if source.device.type == self.device.type:
                    source.record_stream(stream)
        assert buffer.event is not None
        return Readback(tensors, buffer.event)

    def reserve(self, layout: Layout) -> list[torch.Tensor] | None:
        """Reserve host tensors for :meth:`fill`; None beyond the limit of pinned memory."""
        size = self._buffer_size(_offsets(layout)[0])
        if not self._free.get(size) and self._pinned + size > self.most:
            return None
        return self._allocate(layout)[0]

    def fill(
        self, tensors: Sequence[torch.Tensor], rows: slice, sources: Sequence[torch.Tensor]
    ) -> bool:
        """Start copies into ``rows`` of reserved tensors; False for other tensors.

        ``sources``, one per tensor, were computed on the current stream; dtypes are converted.
        """
        buffer = self._buffers.get(tensors[0].data_ptr())
        if buffer is None:
            return False
        targets = [tensor[rows] for tensor in tensors]
        pairs = zip(sources, targets, strict=True)
        converted = [source.to(target.dtype).contiguous() for source, target in pairs]
        self._copy(self._choose_copy(converted, targets), converted, targets, buffer)
        return True

    def event_of(self, tensors: Sequence[torch.Tensor]) -> torch.Event | None:
        """Return the event after the newest copy into reserved tensors; None without a copy."""
        buffer = self._buffers.get(tensors[0].data_ptr())
        return None if buffer is None else buffer.event

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start a copy into contiguous pinned memory, for which the caller records an event."""
        sources, targets = [source.to(target.dtype).contiguous()], [target]
        self._choose_copy(sources, targets)(sources, targets)

    def _choose_copy(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> Copy:
        """Return the kernel's store function if it supports these tensors, else torch's copy."""
        if (
            self._store is not None
            and sum(source.nbytes for source in sources) <= _MAX_STORED
            and all(source.is_cuda for source in sources)
            and all(s.shape == t.shape for s, t in zip(sources, targets, strict=True))
        ):
            return self._store
        return _copy_by_torch

    def _copy(
        self,
        copy: Copy,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        buffer: Buffer,
    ) -> None:
        """Start copies in the current stream, followed by the buffer's event."""
        copy(sources, targets)
        buffer.mark_copied()

    def _allocate(self, layout: Layout) -> tuple[list[torch.Tensor], Buffer]:
        """Create tensors in a buffer, which is free again when none of them is referenced."""
        size, offsets = _offsets(layout)
        buffer, free = self._take(size)
        # Only the tensors and views created here reference this array.
        root = buffer.memory.numpy()
        buffer.lease = weakref.ref(root, lambda _: free.append(buffer))
        tensors = []
        for offset, (shape, dtype) in zip(offsets, layout, strict=True):
            if (numpy_type := _NUMPY_TYPES.get(dtype)) is not None:
                array = np.ndarray(shape, numpy_type, root, offset)
                tensors.append(torch.from_numpy(array))
            else:
                end = offset + prod(shape) * dtype.itemsize
                tensors.append(torch.from_numpy(root[offset:end]).view(dtype).view(shape))
        return tensors, buffer

    def _buffer_size(self, size: int) -> int:
        """Return the size of a buffer for ``size`` bytes: a power of two."""
        return 1 << (max(size, self.least) - 1).bit_length()

    def _take(self, size: int) -> tuple[Buffer, list[Buffer]]:
        """Take or allocate a buffer of at least ``size`` bytes; return it and its free list."""
        size = self._buffer_size(size)
        free = self._free.get(size)
        if free is None:
            free = self._free[size] = []
        # Indices stay valid, because other threads only append.
        for index in range(len(free) - 1, -1, -1):
            if free[index].arrived():
                buffer = free.pop(index)
                break
        else:
            buffer = Buffer(size)
            self._buffers[buffer.memory.data_ptr()] = buffer
            self._pinned += size
        buffer.event = None
        return buffer, free


def _copy_by_torch(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
