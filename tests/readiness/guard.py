"""The sync guard on a machine without a GPU.

Where there is no CUDA, torch has no sync debug mode and flags nothing. ``Guard`` stands in
for the mode and for an operation that it flags.
"""

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import sync_guard

DEFAULT, WARN, ERROR = range(3)


class Runner:
    """A model runner, as far as the guard knows it; a step calls its argument."""

    def execute_model(self, work: Callable[[], Any], dummy_run: bool = False) -> Any:
        return work()

    def sample_tokens(self, work: Callable[[], Any]) -> Any:
        return work()


class Guard(logging.Handler):
    """A machine that seems to have CUDA, and the messages that the guard logs there.

    Attributes:
        mode: the sync debug mode of ``torch.cuda``.
        records: level and message of each record.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.patch = monkeypatch
        self.mode = DEFAULT
        self.records: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelname, record.getMessage()))

    def reports(self) -> list[str]:
        """Return the messages that report a wait."""
        return [message for _, message in self.records if "waits for the device" in message]

    def installed(self, word: str) -> Runner:
        """Return a new runner with the guard that ``word`` asks for."""
        self.patch.setenv(switch.SYNC_GUARD, word)
        runner = Runner()
        sync_guard.install(runner)
        return runner

    def set_mode(self, mode: str | int) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and ...", stacklevel=2)
        self.mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)

    def get_mode(self) -> int:
        return self.mode

    def wait(self) -> int:
        """Make a wait that torch's mode flags."""
        flagged = "called a synchronizing CUDA operation (Triggered internally at CUDA.cpp:1.)"
        if self.mode == WARN:
            warnings.warn(flagged, stacklevel=2)
        elif self.mode == ERROR:
            raise RuntimeError(flagged)
        return 7
