"""Fences: the host waiting for the device, each wait with its owner's name.

A fence is a wait on one event. Its owner is the feature that needs, on the host, a value
that the device has not delivered yet; nothing else may wait.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

_counts: Counter[str] = Counter()
#: Outputs are waited for in a thread of their own.
_lock = threading.Lock()
#: Each is told of every fence: its owner, when it began and when it ended, in nanoseconds
#: of ``time.perf_counter_ns``. As long as there is none, no clock is read.
listeners: list[Callable[[str, int, int], None]] = []


def wait(event: torch.Event, owner: str) -> None:
    """Wait until ``event`` has completed, in the name of ``owner``; no fence if it has."""
    if event.query():
        return
    with _lock:
        _counts[owner] += 1
    if not listeners:
        event.synchronize()
        return
    began = time.perf_counter_ns()
    event.synchronize()
    ended = time.perf_counter_ns()
    for listener in listeners:
        listener(owner, began, ended)


def counts() -> Mapping[str, int]:
    """The fences of this process so far: owner to number of waits."""
    return MappingProxyType(_counts)
