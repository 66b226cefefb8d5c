"""Fix ``lost-wakeups``: bound a reader's wait for the notification of a shared-memory message.

The processes of an engine exchange messages through shared memory. A reader that has been idle for
a second sleeps until a ZeroMQ notification. ZeroMQ may drop a notification, because its queue holds
only one, and counts as full for about a millisecond after a send.

If the OS deschedules the writer for more than a second between a message and its notification, the
reader finds the message by polling. If the next message follows within a millisecond of the late
notification, its own notification is dropped. In 0.22.0 the worker then waits forever, and the
engine dies after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300 by default).
(https://github.com/vllm-project/vllm/pull/45224)
"""

# mirrors: vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

#: Milliseconds after which a sleeping reader polls; upstream's value since 0.27.0. With
#: VLLM_USE_SPINLOOP_EXT, a poll takes up to a tenth of a second.
_LONGEST = 5000


def bounded(timeout: int | None) -> int | None:
    """Return upstream's timeout in milliseconds (None: unlimited), bounded if the fix is on."""
    if registry.LOST_WAKEUPS not in switch.enabled():
        return timeout
    return _LONGEST if timeout is None else min(timeout, _LONGEST)
