"""What a person would look at first: what is there, who uses it, and what apply would do."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from overlay import commands
from overlay.commands import KEPT, Options
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation
from overlay.parts import Choice
from overlay.processes import serving
from overlay.source import Overlay

#: Where NVIDIA's kernel module says what it is; containers with GPUs have it, too.
DRIVER = Path("/proc/driver/nvidia")
#: The variables that decide what an engine that is started from here would do.
_VARIABLES = ("VLLM_READINESS", "VLLM_USE_V2_MODEL_RUNNER")


def findings(installation: Installation, driver: Path = DRIVER) -> Iterator[tuple[str, str]]:
    """Yield what each line is about, and the line.

    Args:
        installation: the one that is named.
        driver: the directory of NVIDIA's kernel module.
    """
    yield "vLLM", f"{installation.title} in {installation.site}"
    python = installation.interpreter
    yield "Python", str(python) if python else "none is known here: name one with --python"
    yield "tool", f"runs on Python {platform.python_version()} of {platform.platform()}"
    yield "device", _device(driver)
    for name in _VARIABLES:
        if name in os.environ:
            yield "set here", f"{name}={os.environ[name]}"
    using = list(serving(installation))
    for process in using or ["nobody who can be seen from here"]:
        yield "serving", process


def prospect(
    installation: Installation, overlay: Overlay, choice: Choice = KEPT
) -> tuple[Exit, str]:
    """Return the code that ``apply`` would end with, and what it would do.

    Args:
        installation: the one that is named.
        overlay: the whole overlay.
        choice: what of it would be laid; if nothing is named, what is installed.
    """
    try:
        outcome = commands.apply(installation, overlay, Options(dry_run=True, choice=choice))
    except OverlayError as error:
        return error.code, f" would be refused: {error.line}"
    changed, selection = len(outcome.changed), outcome.inspection.overlay.selection
    would = f"would change {changed} files" if changed else "has nothing to do"
    return Exit.DONE, f"{selection} {would}"


def _device(driver: Path) -> str:
    try:
        version = (driver / "version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return "no NVIDIA driver is loaded here"
    models = []
    for file in sorted(driver.glob("gpus/*/information")):
        lines = file.read_text(errors="replace").splitlines()
        models += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    counts = [f"{models.count(model)} {model}" for model in dict.fromkeys(models)]
    return f"{', '.join(counts) or 'no GPU'}; {version.partition(':')[2].strip() or version}"
