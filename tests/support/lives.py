"""The names of :mod:`support.lockstep` before they were renamed."""

from support.lockstep import (
    BLOCK,
    DRAFTED,
    OWN,
    VOCABULARY,
    LockstepRun,
    RunnerUnderTest,
    SetAside,
)
from support.lockstep import fail_third_slot as no_room_for_a_third

__all__ = ["BLOCK", "DRAFTED", "OWN", "VOCABULARY", "Life", "SetAside", "no_room_for_a_third"]


class Life(LockstepRun):
    """A lockstep run."""

    @property
    def halves(self) -> list[RunnerUnderTest]:
        """The runners."""
        return self.runners
