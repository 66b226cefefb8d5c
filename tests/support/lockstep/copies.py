"""Simulated copies from the device to the host."""

from collections.abc import Callable

import torch

#: What a host buffer holds until its copy arrives: neither a token nor a placeholder.
POISON = -7_777_777
#: Decides whether a copy has arrived; called at its start, at each query and at each step.
Arrives = Callable[[], bool]


class SimulatedCopy:
    """A copy to the host, and its event.

    Args:
        source: the tensor to copy.
        arrives: decides when the copy arrives.

    Attributes:
        host: the host's buffer.
        done: whether the copy has arrived.
        waits: number of waits before it had arrived.
    """

    def __init__(self, source: torch.Tensor, arrives: Arrives) -> None:
        self.source = source
        self.host = torch.full_like(source, POISON)
        self.done = False
        self.waits = 0
        self._arrives = arrives
        self.query()

    def complete(self) -> None:
        """Let the copy arrive."""
        self.done = True
        self.host.copy_(self.source)

    def query(self) -> bool:
        """Return whether the copy has arrived."""
        if not self.done and self._arrives():
            self.complete()
        return self.done

    def synchronize(self) -> None:
        """Wait for the copy."""
        self.waits += not self.done
        self.complete()
