"""Times of the parts of an engine's step, on the host."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

#: Methods of Model Runner V2, or of an attribute of it, to the part of a step that they belong to.
_V2_PARTS = {
    "finish_requests": "_update_states",
    "free_states": "_update_states",
    "add_requests": "_update_states",
    "update_requests": "_update_states",
    "block_tables.apply_staged_writes": "_update_states",
    "prepare_inputs": "_prepare_inputs",
    "prepare_attn": "_build_attention_metadata",
    "model_state.prepare_attn": "_build_attention_metadata",
}
_V1_PARTS = ("_update_states", "_prepare_inputs", "_build_attention_metadata")
#: Version of the runner to the methods that are the model's own work.
_MODEL = {
    1: ("_model_forward", "model.compute_logits"),
    2: ("cudagraph_manager.run_fullgraph", "model.forward", "model.compute_logits"),
}


class Clock:
    """Nanoseconds of the host in each part, without excluded methods."""

    def __init__(self) -> None:
        self._spent: dict[str, int] = {}
        self._excluded = 0

    def time(self, owner: object, name: str, part: str | None = None) -> None:
        """Time a method of an object from now on, as a part; by default named like the method."""
        self._wrap(owner, name, lambda _, spent: self._add(part or name, spent))

    def exclude(self, owner: object, name: str) -> None:
        """Subtract the time in a method from its callers' times."""

        def add(_: str, spent: int) -> None:
            self._excluded += spent

        self._wrap(owner, name, add)

    def lap(self) -> dict[str, int]:
        """Return the time in each part since the last lap."""
        lap, self._spent = self._spent, {}
        return lap

    def _add(self, name: str, spent: int) -> None:
        self._spent[name] = self._spent.get(name, 0) + spent

    def _wrap(self, owner: object, name: str, add: Callable[[str, int], None]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            excluded, start = self._excluded, time.perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                add(name, time.perf_counter_ns() - start - (self._excluded - excluded))

        setattr(owner, name, timed)


def time_parts(clock: Clock, scheduler: Any, runner: Any, version: int) -> None:
    """Time each part of an engine's steps from now on, without the model's forward and logits.

    Args:
        clock: gets the times.
        scheduler: of the engine.
        runner: of the engine.
        version: of the runner.
    """
    for part in ("schedule", "update_from_output"):
        clock.time(scheduler, part)
    for part in ("execute_model", "sample_tokens"):
        clock.time(runner, part)
    parts = _V2_PARTS if version == 2 else {part: part for part in _V1_PARTS}
    for path, part in parts.items():
        clock.time(*_method(runner, path), part)
    for path in _MODEL[version]:
        clock.exclude(*_method(runner, path))


def _method(owner: Any, path: str) -> tuple[Any, str]:
    *objects, name = path.split(".")
    for attribute in objects:
        owner = getattr(owner, attribute)
    return owner, name
