"""A logits processor as a user of vLLM writes one."""

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class ForbidLatest(LogitsProcessor):  # type: ignore[misc]
    """Forbids each request its last two tokens, and so shows a history that lags."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.outputs: dict[int, list[int]] = {}

    def is_argmax_invariant(self) -> bool:
        """Greedy requests see it."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Keep each row's output list, which vLLM keeps up to date."""
        process_dict_updates(self.outputs, batch_update, lambda _, __, output: output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid each row's last two tokens."""
        for row, output in self.outputs.items():
            logits[row, output[-2:]] = -torch.inf
        return logits


class Spy(ForbidLatest):
    """Records the lists that it is given.

    Attributes:
        seen: row to output, at the step's batch update and when it is sampled.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seen: list[dict[int, list[int]]] = []

    def update_state(self, batch_update: Any) -> None:
        """Start the step's record."""
        super().update_state(batch_update)
        self.seen = [self._given()]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Record what sampling sees."""
        self.seen.append(self._given())
        return super().apply(logits)

    def _given(self) -> dict[int, list[int]]:
        return {row: list(output) for row, output in self.outputs.items()}


class OlderSpy(Spy):
    """Reads all but each request's newest token, and says so."""

    readiness_reads = "older"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid the two tokens before each row's newest."""
        self.seen.append(self._given())
        for row, output in self.seen[-1].items():
            logits[row, output[-2:]] = -torch.inf
        return logits

    def _given(self) -> dict[int, list[int]]:
        return {row: output[:-1] for row, output in self.outputs.items()}


class LengthSpy(Spy):
    """Reads how many tokens each request has, and says so."""

    readiness_reads = "none"

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Forbid a token by how many there are."""
        self.seen.append(self._given())
        for row, output in self.outputs.items():
            logits[row, len(output) % logits.shape[-1]] = -torch.inf
        return logits

    def _given(self) -> dict[int, list[int]]:
        return {row: [len(output)] for row, output in self.outputs.items()}


#: By the name of a lockstep run's processor.
SPIES = {"user": Spy, "plugin": Spy, "older": OlderSpy, "none": LengthSpy}
