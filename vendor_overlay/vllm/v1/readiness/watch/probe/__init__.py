"""The probe: how long each part of a step takes, and who waits for the device.

With ``VLLM_READINESS_PROBE=FILE`` each process that runs a worker or an engine core records
the parts of its steps (:data:`ring.KINDS`) into a ring buffer. It writes them to
``FILE.rank0``, ``FILE.rank1``, ... when it ends, on SIGUSR2, and after a few seconds without
a new record. A process with an engine core and no worker writes ``FILE.engine0``.
``scripts/probe`` reads these files. ``metrics`` shows the same durations as histograms on
vLLM's /metrics.

The probe observes from outside: it wraps methods of the runners, of their outputs and of the
scheduler (``methods``), and reads the clock before and after each call. It works the same way
on a vLLM without the overlay, where this package is loaded by a plugin, so that one
instrument measures both.

A fence is a wait for an event that has not completed. Its owner is the name passed to
``fences.wait``; elsewhere it is the name of the function that waits (``events``). Waits
without an event (``.cpu()``, ``.item()``, blocking copies) count as time of the function
around them, and are not recorded as fences.

Importing this package imports neither torch nor numpy.
"""

import logging
import os

from vllm.v1.readiness.engine import switch

logger = logging.getLogger(__name__)


def install() -> None:
    """Observe this process if VLLM_READINESS_PROBE names a file; otherwise change nothing.

    May be called several times, and before or after the observed modules are imported.

    Raises:
        PathError: the file's directory does not exist, or is not writable.
    """
    path = switch.probe()
    if path is None:
        return
    from vllm.v1.readiness.engine import fences
    from vllm.v1.readiness.watch.probe import claims, events, imports, methods, recorder

    claims.engine_id()  # before there are other processes of this engine
    recorder.listen()
    if not recorder.enable(os.path.abspath(path)):
        return
    fences.listeners.append(recorder.record_fence)
    events.watch()
    for module, watch in methods.WATCHED.items():
        imports.when_imported(module, watch)
    logger.info("Readiness probe on: records go to %s.*", switch.shown(path))
