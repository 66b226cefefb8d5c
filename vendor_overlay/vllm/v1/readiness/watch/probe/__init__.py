"""The probe: durations of the parts of a step, and waits for the device by owner.

With ``VLLM_READINESS_PROBE=FILE``, each process with a worker or an engine core records the parts
of its steps (:data:`ring.KINDS`) into a ring buffer. A worker's process writes the buffer to
``FILE.rank0``, ``FILE.rank1``, ..., and other processes to ``FILE.engine0``: at exit, on SIGUSR2,
and after a few seconds without a record. ``scripts/probe`` reads these files. ``metrics`` exports
the durations as histograms on vLLM's /metrics.

The probe wraps methods of the runners, their outputs and the scheduler (``methods``), and reads the
clock around each call. On stock vLLM a plugin loads this package, so both are measured alike.

A fence is a wait for an event that has not completed. Its owner is the name passed to
``fences.wait``, or the name of another waiting function (``events``). Waits without an event
(``.cpu()``, ``.item()``, blocking copies) count as time of the enclosing function.

Importing this package imports neither torch nor numpy.
"""

import logging

from vllm.v1.readiness.engine import switch

logger = logging.getLogger(__name__)


def install() -> None:
    """Observe this process if VLLM_READINESS_PROBE names a file; a no-op on further calls.

    May be called before or after the observed modules are imported.

    Raises:
        PathError: the file's directory does not exist, or is not writable.
    """
    path = switch.probe()
    if path is None:
        return
    from vllm.v1.readiness.engine import fences
    from vllm.v1.readiness.watch import wrapping
    from vllm.v1.readiness.watch.probe import claims, events, methods, recorder

    claims.engine_id()  # inherited by the engine's other processes
    recorder.listen()
    if not recorder.enable(path):
        return
    fences.listeners.append(recorder.record_fence)
    events.watch()
    for module, watch in methods.WATCHED.items():
        wrapping.when_imported(module, watch)
    logger.info("Readiness probe on: recording to %s.*", switch.shown(path))
