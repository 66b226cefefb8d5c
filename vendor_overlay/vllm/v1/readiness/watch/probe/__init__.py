"""The probe: durations of the parts of a step, and waits for the device by owner, on /metrics.

With ``VLLM_READINESS_PROBE=1``, each process with a worker or an engine core wraps methods of the
runners, their outputs and the scheduler (``methods``), reads the clock around each call, and counts
the durations in histograms (``histograms``). A path in place of 1 names a file to which the
engine's first process writes the metrics when it exits.

A fence is a wait for an event that has not completed. Its owner is the name passed to
``fences.wait``, or the name of another waiting function (``events``). Waits without an event
(``.cpu()``, ``.item()``, blocking copies) count as time of the enclosing function.

Importing this package does not import torch.
"""

import logging
import os

from vllm.v1.readiness.engine import switch

logger = logging.getLogger(__name__)


def install() -> None:
    """Observe this process if VLLM_READINESS_PROBE is set; a no-op on further calls.

    May be called before or after the observed modules are imported.

    Raises:
        PathError: the directory of the named file does not exist, or is not writable.
    """
    value = switch.probe()
    if value is None:
        return
    from vllm.v1.readiness.engine import fences
    from vllm.v1.readiness.watch import wrapping
    from vllm.v1.readiness.watch.probe import events, histograms, methods

    if methods.record_fence in fences.listeners:
        return
    fences.listeners.append(methods.record_fence)
    os.register_at_fork(after_in_child=histograms.clear)
    events.watch(methods.record_fence)
    for module, watch in methods.WATCHED.items():
        wrapping.when_imported(module, watch)
    logger.info("Readiness probe on; a step's parts are on /metrics as vllm:readiness_*_seconds.")
