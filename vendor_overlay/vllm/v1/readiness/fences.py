"""Fences: the host waiting for the device, each wait with its owner's name.

A fence is a wait on one event. Its owner is the feature that needs, on the host, a value
that the device has not delivered yet; nothing else may wait.
"""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch

_counts: Counter[str] = Counter()


def wait(event: torch.Event, owner: str) -> None:
    """Wait until ``event`` has completed, in the name of ``owner``; no fence if it has."""
    if event.query():
        return
    _counts[owner] += 1
    event.synchronize()


def counts() -> Mapping[str, int]:
    """The fences of this process so far: owner to number of waits."""
    return MappingProxyType(_counts)
