"""Fix ``lost-wakeups``: a message between an engine's processes is read, announced or not.

The processes of an engine exchange messages through shared memory. A reader that read none for a
second waits for an announcement, which ZeroMQ may drop: its queue holds one, and is taken for full
until about a millisecond after that one was sent. If the writer loses its processor for more than
a second between a message and its announcement, the reader finds that message by itself, and waits
for the next one by the time the announcement comes. The next message follows within a millisecond;
its announcement is dropped, and a worker of stock 0.22.0 waits for it for ever. The engine then
ends, after the 300 seconds of VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS.
(https://github.com/vllm-project/vllm/pull/45224)
"""

# mirrors: vllm.distributed.device_communicators.shm_broadcast:SpinCondition.wait

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

#: Milliseconds after which an idle reader looks for a message that was not announced; upstream's
#: since 0.27.0. With VLLM_USE_SPINLOOP_EXT each look takes up to a tenth of a second.
_LONGEST = 5000


def bounded(timeout: int | None) -> int | None:
    """Return how long a reader is to wait for an announcement before it looks for a message.

    Args:
        timeout: what upstream would wait, milliseconds; None: for ever.
    """
    if registry.LOST_WAKEUPS not in switch.enabled():
        return timeout
    return _LONGEST if timeout is None else min(timeout, _LONGEST)
