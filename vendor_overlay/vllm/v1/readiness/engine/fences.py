"""Fences: waits of the host for the device, each with the name of its owner.

A fence is a wait for one event. Its owner is the consumer that needs a value on the host
that the device has not delivered yet; nothing else may wait.
"""

# mirrors: nothing

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from vllm.v1.readiness import registry

# The owners. A feature that waits in its own name has the feature's name.
HISTORY = registry.HISTORY
PENALTIES = registry.PENALTIES
BAD_WORDS = registry.BAD_WORDS
GRAMMARS = registry.GRAMMARS
THINKING_BUDGET = registry.THINKING_BUDGET
LOGITS_PROCESSORS = "logits-processors"
MIN_TOKENS = "min-tokens"
OUTPUT = "output"
PROMPT_LOGPROBS = "prompt-logprobs"
NAN_COUNTS = "nan-counts"
WARM_UP = "warm-up"

_counts: Counter[str] = Counter()
#: Async outputs are waited for in a thread of their own.
_lock = threading.Lock()
#: Each is called for every fence with its owner, begin and end in nanoseconds of
#: ``time.perf_counter_ns``. While there are none, no clock is read.
listeners: list[Callable[[str, int, int], None]] = []


def wait(event: torch.Event, owner: str) -> None:
    """Wait for an event in the name of ``owner``; an event that has completed is no fence."""
    if event.query():
        return
    with _lock:
        _counts[owner] += 1
    if not listeners:
        event.synchronize()
        return
    began = time.perf_counter_ns()
    event.synchronize()
    ended = time.perf_counter_ns()
    for listener in listeners:
        listener(owner, began, ended)


def counts() -> Mapping[str, int]:
    """Return the fences of this process so far: owner to number of waits."""
    return MappingProxyType(_counts)
