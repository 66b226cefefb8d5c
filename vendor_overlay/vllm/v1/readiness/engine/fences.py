"""Fences: waits of the host for a device event. The overlay waits for the device only by fences.

Each fence has an owner: the consumer that needs the value on the host.
"""

# mirrors: nothing

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from vllm.v1.readiness import registry

# Names of owners. A feature owns fences under its own name.
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
#: Protects the counts, because async outputs are read in another thread.
_lock = threading.Lock()
#: Called after each fence with owner, begin and end (``time.perf_counter_ns``).
listeners: list[Callable[[str, int, int], None]] = []


def wait(event: torch.Event, owner: str) -> None:
    """Wait for an event, and count a fence of ``owner`` if the event was not complete."""
    if event.query():
        return
    with _lock:
        _counts[owner] += 1
    began = time.perf_counter_ns()
    event.synchronize()
    ended = time.perf_counter_ns()
    for listener in listeners:
        listener(owner, began, ended)


def counts() -> Mapping[str, int]:
    """Return the number of fences in this process by owner."""
    return MappingProxyType(_counts)
