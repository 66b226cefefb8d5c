"""Non-blocking copies from the host to the device."""

# mirrors: nothing

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.math_utils import round_up


def pinned(values: Sequence[int], pin_memory: bool) -> torch.Tensor:
    """Create an int64 tensor [n] on the host, in pinned memory if ``pin_memory``."""
    return torch.tensor(values, pin_memory=pin_memory)


def upload(
    values: np.ndarray, dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> torch.Tensor:
    """Upload an array [n]; does not sync with the device if ``pin_memory``."""
    staged = torch.empty(values.size, dtype=dtype, pin_memory=pin_memory)
    staged.numpy()[:] = values
    return staged.to(device, non_blocking=True)


def together(
    wide: Sequence[np.ndarray], narrow: Sequence[np.ndarray], device: torch.device, pin_memory: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Upload arrays [n] in one copy; does not sync with the device if ``pin_memory``.

    ``wide`` arrays become int64, ``narrow`` arrays int32. Each call allocates host memory, because
    earlier copies may be in flight. Results are aligned to 16 bytes for Triton kernels.
    """
    split = 2 * sum(round_up(array.size, 2) for array in wide)
    size = split + sum(round_up(array.size, 4) for array in narrow)
    staged = torch.empty(size, dtype=torch.int32, pin_memory=pin_memory)
    host = staged.numpy()
    wide_slices = _lay_out(wide, host[:split].view(np.int64), 2)
    narrow_slices = _lay_out(narrow, host[split:], 4)
    sent = staged.to(device, non_blocking=True)
    widened, rest = sent[:split].view(torch.int64), sent[split:]
    return [widened[part] for part in wide_slices], [rest[part] for part in narrow_slices]


def _lay_out(arrays: Sequence[np.ndarray], memory: np.ndarray, unit: int) -> list[slice]:
    """Write arrays to ``memory``, aligned to ``unit`` elements, and return their slices."""
    slices, start = [], 0
    for array in arrays:
        slices.append(slice(start, start + array.size))
        memory[slices[-1]] = array
        start += round_up(array.size, unit)
    return slices
