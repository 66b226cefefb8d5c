"""Diagnosis of an installation: its files, its processes, and the effect of apply."""

from __future__ import annotations

import os
from collections.abc import Iterator

from overlay import commands
from overlay.commands import KEPT, Options
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation
from overlay.parts import Choice
from overlay.processes import serving
from overlay.source import Overlay

#: Variables that change an engine started from this shell.
_VARIABLES = ("VLLM_READINESS", "VLLM_USE_V2_MODEL_RUNNER")


def findings(installation: Installation) -> Iterator[tuple[str, str]]:
    """Yield pairs of a label and a line of the report."""
    yield "vLLM", f"{installation.title} in {installation.site}"
    python = installation.interpreter
    yield "Python", str(python) if python else "none found: name one with --python"
    for name in _VARIABLES:
        if name in os.environ:
            yield "set here", f"{name}={os.environ[name]}"
    using = list(serving(installation))
    for process in using or ["no visible process"]:
        yield "serving", process


def prospect(
    installation: Installation, overlay: Overlay, choice: Choice = KEPT
) -> tuple[Exit, str]:
    """Return the exit code of an ``apply`` with this choice, and a phrase for its effect."""
    try:
        outcome = commands.apply(installation, overlay, Options(dry_run=True, choice=choice))
    except OverlayError as error:
        return error.code, f" would be refused: {error.line}"
    changed, selection = len(outcome.changed), outcome.inspection.overlay.selection
    would = f"would change {changed} files" if changed else "has nothing to do"
    return Exit.DONE, f"{selection} {would}"
