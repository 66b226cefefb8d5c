"""Fix ``lost-wakeups``: bound the wait for the notification of a message in shared memory.

The processes of an engine exchange messages through shared memory. A reader that has been idle for
a second sleeps until ZeroMQ notifies it. ZeroMQ may drop a notification: its queue holds one, and
counts as full for about a millisecond after a send.

If the writer is descheduled for more than a second between a message and its notification, the
reader finds this message by polling. The notification of another message is dropped if it is sent
within a millisecond after the late one. A worker of stock 0.22.0 then waits forever, and the engine
dies after VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS (300). (https://github.com/vllm-project/vllm/pull/45224)
"""

# mirrors: vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

#: Milliseconds after which an idle reader polls; upstream's value since 0.27.0. With
#: VLLM_USE_SPINLOOP_EXT each poll takes up to a tenth of a second.
_LONGEST = 5000


def bounded(timeout: int | None) -> int | None:
    """Bound the timeout of upstream's wait, in milliseconds; None is unlimited."""
    if registry.LOST_WAKEUPS not in switch.enabled():
        return timeout
    return _LONGEST if timeout is None else min(timeout, _LONGEST)
