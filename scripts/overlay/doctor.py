"""Diagnosis of an installation: its Python, its processes, what acts, and the effect of apply."""

from __future__ import annotations

import os

from overlay import commands, words
from overlay.commands import KEPT, Options
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation
from overlay.parts import Choice
from overlay.processes import serving
from overlay.source import Overlay

#: Variables that change an engine started from this shell.
_VARIABLES = ("VLLM_READINESS", "VLLM_USE_V2_MODEL_RUNNER")


def diagnose(
    installation: Installation, overlay: Overlay, choice: Choice = KEPT
) -> tuple[Exit, list[tuple[str, str]]]:
    """Return the exit code of an ``apply`` with this choice, and pairs of a label and a line."""
    python = installation.interpreter
    found = [("vLLM", f"{installation.title} in {installation.site}")]
    found.append(("Python", str(python) if python else "none found: name one with --python"))
    found += [("set here", f"{v}={os.environ[v]}") for v in _VARIABLES if v in os.environ]
    processes = list(serving(installation)) or ["no visible process"]
    found += [("serving", process) for process in processes]
    found += _acting(overlay)
    try:
        outcome = commands.apply(installation, overlay, Options(dry_run=True, choice=choice))
    except OverlayError as error:
        code, would = error.code, f" would be refused: {error.line}"
    else:
        changed = len(outcome.changed)
        would = f"would change {changed} files" if changed else "has nothing to do"
        code, would = Exit.DONE, f"{outcome.inspection.overlay.selection} {would}"
    return code, [*found, ("apply", f"of overlay {overlay.pin.overlay}{would}")]


def _acting(overlay: Overlay) -> list[tuple[str, str]]:
    """Return which features and fixes act, by model runner and device."""
    if words.MODULE not in overlay.pin.result:
        return []
    every = sorted(words.registry(overlay).ALL)
    lines = []
    for device, other in (("GPU", "cpu"), ("CPU", "gpu")):
        idle = [word for word in every if vars(word)["device"] == other]
        lines.append((f"V1, {device}", f"every feature and fix acts but {', '.join(idle)}"))
    on_v2 = [word for word in every if vars(word)["on_v2"]]
    return [*lines, ("V2", f"only these act: {', '.join(on_v2)}")]
