"""The names of :mod:`support.lockstep` and :mod:`support.batches` before they were renamed."""

from support.batches import fail_third_slot as no_room_for_a_third
from support.lockstep import BLOCK, VOCABULARY
from support.lockstep import LockstepRun as Life

__all__ = ["BLOCK", "VOCABULARY", "Life", "no_room_for_a_third"]
