"""Calls that wait for the device: by the clock, and those that torch's sync debug mode misses."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Cycles that occupy a device for about a tenth of a second.
LONG = 200_000_000


def waited(act: Any) -> float:
    """Seconds of a call while the device is busy for about a tenth of a second."""
    act()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    began = time.perf_counter()
    act()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took


@contextmanager
def errors_for_waits() -> Iterator[None]:
    """Have torch's sync debug mode raise an error for a wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warn_of_missed(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Warn, as torch's sync debug mode does, of waits that it misses.

    These are synchronizations of a whole device, and non-blocking copies to the host that block.

    Args:
        patch: sets an attribute of an owner by name.
    """
    copy, convert = torch.Tensor.copy_, torch.Tensor.to

    def copy_(self: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and isinstance(source, torch.Tensor) and _blocks(self, source):
            _warn("Tensor.copy_")
        return copy(self, source, non_blocking)

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = convert(self, *args, **kwargs)
        non_blocking = kwargs.get("non_blocking") or any(arg is True for arg in args)
        if non_blocking and _blocks(result, self):
            _warn("Tensor.to")
        return result

    patch(torch.Tensor, "copy_", copy_)
    patch(torch.Tensor, "to", to)
    for module in (torch.cuda, torch.accelerator):
        patch(module, "synchronize", _warning(module.synchronize))


def _warn(name: str) -> None:
    warnings.warn(f"called a synchronizing CUDA operation: {name}", stacklevel=3)


def _warning(synchronize: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(synchronize)
    def warned(*args: Any, **kwargs: Any) -> None:
        _warn("synchronize")
        synchronize(*args, **kwargs)

    return warned


def _blocks(destination: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether a non-blocking copy to the host blocks nevertheless.

    It does if ``destination`` is pageable, or if the copy is not contiguous, because torch then
    copies through a pageable temporary.
    """
    if not source.is_cuda or destination.device.type != "cpu" or destination.numel() == 0:
        return False
    if not destination.is_pinned():
        return True
    if destination.is_contiguous():
        return False
    order = sorted(range(destination.dim()), key=destination.stride, reverse=True)
    return not (
        destination.dtype == source.dtype
        and destination.shape == source.shape
        and destination.permute(order).is_contiguous()
        and source.permute(order).is_contiguous()
    )
