"""Uploads: copies from the host to the device that the host does not wait for."""

from collections.abc import Sequence

import numpy as np
import torch


def pinned(values: Sequence[int], pin_memory: bool) -> torch.Tensor:
    """Make an int64 tensor on the host whose non-blocking upload does not block.

    Args:
        values: [n].
        pin_memory: whether the platform can pin memory; pageable memory is used if not.
    """
    return torch.tensor(values, pin_memory=pin_memory)


def upload(
    values: np.ndarray, dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> torch.Tensor:
    """Upload an array [n], without waiting for the device if memory can be pinned."""
    staged = torch.empty(values.size, dtype=dtype, pin_memory=pin_memory)
    staged.numpy()[:] = values
    return staged.to(device, non_blocking=True)
