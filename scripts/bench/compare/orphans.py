"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
