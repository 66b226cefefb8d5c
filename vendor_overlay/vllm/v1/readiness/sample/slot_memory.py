"""Device memory for slots of one size.

Slots are parts of slabs. On CUDA and ROCm, slabs are allocated from a separate memory pool, so they
do not split cached blocks that activations will reuse. A slot is free again when its tensor is no
longer referenced. A slab is allocated only if the device has room for the slab and for the part of
the peak activation memory that PyTorch's allocator does not hold at that time.
"""

# mirrors: nothing

from contextlib import nullcontext
from typing import TYPE_CHECKING
from weakref import ref

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.config import CacheConfig

logger = init_logger(__name__)

#: Bytes per slab. PyTorch rounds allocations above 10 MiB up to a multiple of 2 MiB.
_SLAB = 16 << 20
#: Bytes that vLLM may use beyond gpu_memory_utilization: contexts, graphs, fragmentation.
_MARGIN = 1 << 30


class SlotMemory:
    """Slots of ``length`` int32 values, at most ``capacity`` of them in use.

    Attributes:
        nbytes: bytes per slot.
        reserved: whether all slots have been allocated permanently.
    """

    def __init__(self, length: int, capacity: int, device: torch.device) -> None:
        self.nbytes = 4 * length
        self.reserved = False
        self._length = length
        self._capacity = capacity
        self._slots_a_slab = max(1, min(_SLAB // self.nbytes, capacity))
        self._device = device
        self._on_device = current_platform.is_cuda_alike() and device.type == "cuda"
        self._pool: torch.cuda.MemPool | None = None
        self._free: list[torch.Tensor] = []
        #: Slots in use, by address.
        self._taken: dict[int, ref[torch.Tensor]] = {}
        self._before = 0
        self._activations: int | None = None

    @property
    def allocated(self) -> int:
        """Number of slots that have memory, in use or free."""
        return len(self._free) + len(self._taken)

    def begin_profile(self, cache: "CacheConfig") -> None:
        """Allocate all slots now if there may be no room later. Raises torch.OutOfMemoryError.

        Allocates nothing if the user has set the size of the KV cache.
        """
        if not self._on_device or self.reserved:
            return
        self._before = torch.cuda.memory_allocated(self._device)
        if cache.kv_cache_memory_bytes:
            return
        free, total = torch.cuda.mem_get_info(self._device)
        usable = int(cache.gpu_memory_utilization * total)
        left = free + torch.cuda.memory_reserved(self._device) - usable
        needed = self.nbytes * self._capacity
        if left >= needed + _MARGIN:
            return
        self._allocate_slab(self._capacity)
        self.reserved = True
        logger.info_once(
            "Readiness overlay: the KV cache is %.0f MiB smaller, to leave room for the "
            "penalties of %d requests. Set %s=N to reserve memory for N requests.",
            *(needed / (1 << 20), self._capacity, switch.SLOTS),
        )

    def end_profile(self) -> None:
        """Measure the peak activation memory; later calls are no-ops."""
        if self._on_device and self._activations is None:
            self._activations = torch.cuda.max_memory_allocated(self._device) - self._before

    def allocate(self) -> torch.Tensor:
        """Allocate a slot, of any values. Raises torch.OutOfMemoryError if there is no room."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        slot = row.view_as(row)
        # Bind the current list, not self: a slot of a released slab must not be reused.
        taken, free, address = self._taken, self._free, row.data_ptr()

        def give_back(_: object) -> None:
            del taken[address]
            free.append(row)

        taken[address] = ref(slot, give_back)
        return slot

    def release(self) -> None:
        """Free the slabs if no slot is in use; keep reserved ones, and a single one.

        Penalised requests that come one at a time would allocate one again for each.
        """
        if not (self._taken or self.reserved) and self.allocated > self._slots_a_slab:
            self._free = []
            self._pool = None

    def _grow(self) -> None:
        slots = max(1, min(self._slots_a_slab, self._capacity - self.allocated))
        if self._on_device:
            used = torch.cuda.memory_allocated(self._device) + (self._activations or 0)
            planned = max(0, used - torch.cuda.memory_reserved(self._device))
            free, _ = torch.cuda.mem_get_info(self._device)
            if free - planned < slots * self.nbytes:
                raise torch.OutOfMemoryError(
                    f"{slots} slots of {self.nbytes} bytes do not fit: {free} bytes are free, "
                    f"of which activations need {planned}."
                )
        self._allocate_slab(slots)

    def _allocate_slab(self, slots: int) -> None:
        if self._on_device and self._pool is None:
            self._pool = torch.cuda.MemPool()
        own = nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool)
        with own:
            slab = torch.empty((slots, self._length), dtype=torch.int32, device=self._device)
        self._free.extend(slab)
