"""The environment variables for programs that ours start."""

from __future__ import annotations

import os
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]

#: The Makefile sets PYTHONSAFEPATH to this if nobody has set it.
_SAFE_PATH = "make"


def children_environment() -> dict[str, str]:
    """This process's environment as it was before the Makefile made our packages importable.

    Without the entry of PYTHONPATH that leads to ``scripts``, and without PYTHONSAFEPATH
    unless somebody else set it.
    """
    environment = dict(os.environ)
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    if kept := [entry for entry in entries if entry and Path(entry).resolve() != SCRIPTS]:
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    if environment.get("PYTHONSAFEPATH") == _SAFE_PATH:
        del environment["PYTHONSAFEPATH"]
    return environment
