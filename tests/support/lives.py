"""The names of :mod:`support.lockstep` and :mod:`support.batches` before they were renamed."""

from support.batches import fail_third_slot as no_room_for_a_third
from support.lockstep import BLOCK, VOCABULARY, LockstepRun, RunnerUnderTest

__all__ = ["BLOCK", "VOCABULARY", "Life", "no_room_for_a_third"]


class Life(LockstepRun):
    """A lockstep run."""

    @property
    def halves(self) -> list[RunnerUnderTest]:
        """The runners."""
        return self.runners
