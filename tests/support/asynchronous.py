"""A CPU engine that schedules asynchronously, as engines on a GPU do by default.

vLLM's CPU platform switches async scheduling off, and its runner has no streams or events.
:func:`register` is a general plugin, which vLLM loads in every process of an engine. It keeps
the setting and supplies a simulated device: scheduler, executor and runner take the path that
they take on a GPU, and readbacks arrive late, when the device decides. Its decisions are drawn
with the seed in SIMULATED_SEED until :func:`simulate` replaces them.
Nothing is installed: :func:`announce` makes a directory that only has to be on the path.
"""

import itertools
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from support.device import Decide, Device, install

_device = Device(lambda _: 0)


def seeded(seed: int) -> Decide:
    """Draw decisions with a seed."""
    return random.Random(seed).randrange


def cycling(numbers: Sequence[int]) -> Decide:
    """Repeat decisions from a list; an empty list makes no progress."""
    endless = itertools.cycle(numbers or [0])
    return lambda n: next(endless) % n


def simulate(_: Any, decisions: Sequence[int]) -> dict[str, int]:
    """Set the decisions of a worker's device; an engine's ``collective_rpc`` calls it.

    Returns:
        The device's counts so far.
    """
    with _device.lock:
        _device.decide = cycling(decisions)
        for stream in _device.streams:
            stream.finish()
        names = ("copies", "stream_waits", "allocations", "strays", "rewritten")
        return {name: getattr(_device, name) for name in names}


def register() -> None:
    """Make this process's CPU engines take the asynchronous path."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker import cpu_model_runner

    _device.decide = seeded(int(os.environ.get("SIMULATED_SEED", "0")))
    install(_device)
    cpu_model_runner._torch_cuda_wrapper = nullcontext

    decide = CpuPlatform.check_and_update_config

    def keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        decide(config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = staticmethod(keep)


def announce(folder: Path, *plugins: Callable[[], None]) -> Path:
    """Make ``folder`` announce plugins to a Python that has it on its path.

    Of folders with the same last name, only the first on the path counts.
    """
    metadata = folder / f"{folder.name}-0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    entries = [f"{load.__module__} = {load.__module__}:{load.__name__}" for load in plugins]
    (metadata / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *entries, ""]))
    return folder
