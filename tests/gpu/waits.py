"""Whether a call waits for a busy device."""

import time
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
