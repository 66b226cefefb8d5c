"""Check of the overlay's environment variables, without an import of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

from overlay.interpreter import MARK, NoAnswer, answer

#: Reads every variable with the runtime's own readers. Without site-packages on the path, ``vllm``
#: is a namespace package that holds the runtime alone.
_READ = f"""
import json, os, sys
sys.path.insert(0, json.load(sys.stdin))
from vllm.v1.readiness.engine import switch
problem = None
try:
    for read in switch.VARIABLES.values():
        read()
except switch.VariableError as error:
    problem = str(error)
os.write(1, {MARK!r} + json.dumps(problem).encode() + b"\\n")
"""


def problem(root: Path) -> str | None:
    """Return why the engine would refuse a variable of the overlay; None without a reason.

    ``root`` is a copy of the overlay, whose version is installed. An interpreter that cannot run
    the check is no reason: the engine reads the variables again.
    """
    flags, folder = ("-B", "-I", "-S"), str(root / "vendor_overlay")
    try:
        found: str | None = answer(Path(sys.executable), _READ, *flags, request=folder)
    except NoAnswer:
        return None
    return found
