"""Lockstep runs: upstream's scheduler drives upstream's runner and ours side by side.

Real are the scheduler, the input batch, the samplers, and the parts of the runner that keep
requests' state and sample. Simulated are the model, the drafter and the copies to the host.

A run may have twins: ours once more with copies that arrive at once, and once more with copies
that arrive only when they are waited for, also where the engine has read another rank's.
Consumers must see the same in all three.
"""

from support.batches import fail_third_slot
from support.lockstep.model import DRAFTED
from support.lockstep.run import LockstepRun, SetAside
from support.lockstep.runner import OWN, RunnerUnderTest
from support.scheduling import BLOCK, VOCABULARY

__all__ = [
    "BLOCK",
    "DRAFTED",
    "OWN",
    "VOCABULARY",
    "LockstepRun",
    "RunnerUnderTest",
    "SetAside",
    "fail_third_slot",
]
