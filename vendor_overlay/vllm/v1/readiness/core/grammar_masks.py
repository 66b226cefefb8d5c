"""Scheduler part of the feature ``grammars``: fill slow grammar bitmasks in several threads.

Filling one bitmask takes from a few microseconds to a few tenths of a millisecond, depending on the
number of tokens that xgrammar must check. The device idles if filling all bitmasks takes longer
than the forward pass. Upstream fills up to 128 bitmasks serially, although xgrammar releases the
GIL and the bitmasks are independent. Here helper threads share the work if the previous step's
bitmasks were slow. Steps with speculative decoding, and backends other than xgrammar, fall back to
upstream.
"""

# mirrors: vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask
# mirrors: vllm.v1.structured_output:StructuredOutputManager._fill_bitmasks
# mirrors: vllm.v1.structured_output:StructuredOutputManager._async_submit_fill_bitmask

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import originals, subclasses, switch

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    #: A grammar, the row of its bitmask, and whether the bitmask applies.
    Mask = tuple[StructuredOutputGrammar, int, bool]

logger = init_logger(__name__)

_METHODS = ("_fill_bitmasks", "should_fill_bitmask")
#: CPU seconds per step that justify one helper thread.
_WORTH = 1e-3
#: Maximum number of helper threads, as in upstream.
_THREADS = 8


def fill(
    manager: "StructuredOutputManager",
    requests: "dict[str, Request]",
    names: list[str],
    drafts: int,
) -> "np.ndarray | None":
    """Fill a step's bitmasks, int32 [bitmasks, words]; None to fall back to upstream.

    ``names`` are the ids of the requests that need a bitmask, in order. ``drafts`` is the maximum
    number of drafts per request.
    """
    filler: Filler = subclasses.remembered(manager, lambda: Filler(manager))
    if drafts or not filler.on or type(manager.backend) is not filler.backend:
        return None
    grammars = []
    for name in names:
        structured = requests[name].structured_output_request
        grammars.append(structured.grammar if structured is not None else None)
    if any(type(grammar) not in filler.grammars for grammar in grammars):
        return None
    apply = [manager.should_fill_bitmask(requests[name]) for name in names]
    filler.fill(manager, list(zip(grammars, range(len(names)), apply, strict=True)))
    masks: np.ndarray = manager._grammar_bitmask[: len(names)].numpy()
    return masks


class Filler:
    """Fills the bitmasks of one manager; ``backend`` and ``grammars`` are supported classes."""

    def __init__(self, manager: "StructuredOutputManager") -> None:
        from vllm.v1.readiness.core.ended_grammars import EndingXgrammar
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, XgrammarGrammar

        self.on = registry.GRAMMARS in switch.enabled() and originals.all_vllms(manager, _METHODS)
        self.backend, self.grammars = XgrammarBackend, (XgrammarGrammar, EndingXgrammar)
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        self._threads: ThreadPoolExecutor | None = None
        #: Mean CPU seconds per bitmask in the newest step.
        self._each = 0.0

    def fill(self, manager: "StructuredOutputManager", masks: "list[Mask]") -> None:
        """Fill bitmasks, with as many threads as the previous step's CPU time justifies."""
        helpers = int(min(len(masks) * self._each / _WORTH, self._cores // 2, _THREADS))
        if helpers < 1:
            began = time.thread_time()
            manager._fill_bitmasks(masks)
            self._each = (time.thread_time() - began) / len(masks)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="readiness-grammars")
        count, left = len(masks), masks[::-1]
        inference = torch.is_inference_mode_enabled()

        def work() -> float:
            began = time.thread_time()
            with torch.inference_mode(inference):  # not inherited by threads
                while left:
                    try:
                        mask = left.pop()
                    except IndexError:  # another thread took the last mask
                        break
                    manager._fill_bitmasks((mask,))
            return time.thread_time() - began

        others: list[Future[float]] = []
        try:
            self._submit(work, helpers, others)
            taken = work()
        except BaseException:
            left.clear()
            raise
        finally:
            wait(others)  # no thread may write bitmasks after the step
        self._each = (taken + sum(other.result() for other in others)) / count

    def _submit(self, work: Callable[[], float], count: int, others: "list[Future[float]]") -> None:
        """Start helper threads. If a thread cannot be started, later steps start none."""
        assert self._threads is not None
        try:
            for _ in range(count):
                others.append(self._threads.submit(work))
        except RuntimeError:
            logger.warning("Cannot start a thread. One thread fills all grammar masks.")
            self._cores = 1
