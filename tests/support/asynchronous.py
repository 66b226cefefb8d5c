"""A CPU engine that schedules asynchronously, as engines on a GPU do by default.

vLLM's CPU platform switches async scheduling off, and its runner stands in for streams
and events only while it is being built. :func:`register` is a general plugin of vLLM,
which is loaded in every process of an engine. It keeps the setting and supplies stand-ins
that last, so that scheduler, executor and runner take the path that they take on a GPU.
Nothing is installed: :func:`announce` makes a directory that only needs to be on the path.
"""

import itertools
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

_numbers = itertools.count()


class Event:
    """A ``torch.Event`` of work that is done, and that admits it late.

    A device is behind its host, so whoever asks an event finds it pending at first. Here
    one event in three says yes at once, one after the first question and one after the
    second, so that both answers are met in a run of any length.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        self._late = 0

    def record(self, _: Any = None) -> None:
        """Begin again."""
        self._late = next(_numbers) % 3

    def query(self) -> bool:
        """Whether the work is done, as far as the host can know."""
        self._late -= 1
        return self._late < 0

    def synchronize(self) -> None:
        """Wait, after which the answer is yes."""
        self._late = 0

    def wait(self, _: Any = None) -> None:
        """Let a stream wait, which tells the host nothing."""


class Stream:
    """A ``torch.cuda.Stream``: on a CPU everything is in order anyway."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Wait for all that was launched on another stream."""

    def wait_event(self, _: Any) -> None:
        """Wait for an event."""

    def record_event(self, event: Any = None) -> Any:
        """Mark this place in the stream."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all that was launched is done."""
        return True

    def synchronize(self) -> None:
        """Wait for all that was launched."""


_current = Stream()


@contextmanager
def _on(_: Any) -> Iterator[None]:
    yield


def register() -> None:
    """Bring the CPU engine of this process into the asynchronous path."""
    from vllm.platforms.cpu import CpuPlatform

    torch.Event = Event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda _=None: _current
    torch.cuda.stream = _on
    if multiprocessing.parent_process():  # a worker; elsewhere the import is for nothing
        from vllm.v1.worker import cpu_model_runner

        cpu_model_runner._torch_cuda_wrapper = nullcontext

    decide = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        decide(config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(keep)


def announce(folder: Path) -> Path:
    """Make ``folder`` announce the plugin to a Python that has it on its path."""
    metadata = folder / "asynchronous-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    entry = f"asynchronous = {__name__}:{register.__name__}"
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return folder
