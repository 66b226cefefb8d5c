"""Start-up of each process of an engine: checks, exported metrics and the probe."""

# mirrors: nothing

import multiprocessing
import os
import sys
from itertools import pairwise

from vllm.v1.readiness.engine import switch


def start() -> None:
    """Check the variables, and start exports and the probe. A no-op on further calls.

    Raises:
        VariableError: a variable is invalid.
        SystemExit: the same, in a command of vLLM; the message is one line.
    """
    from vllm.v1.readiness.watch import exports, probe

    try:
        switch.check()
    except switch.VariableError as error:
        if _is_command():
            raise SystemExit(f"vllm: {error}") from None
        raise
    exports.begin(new=_is_command())
    probe.install()


def _is_command() -> bool:
    """Return whether this is the first process of ``vllm ...`` or ``python -m vllm...``."""
    if multiprocessing.parent_process() is not None:  # it inherits sys.argv
        return False
    started = getattr(sys, "orig_argv", [])
    modules = [value for flag, value in pairwise(started) if flag == "-m"]
    names = [os.path.basename(sys.argv[0]), *(module.split(".")[0] for module in modules[:1])]
    return "vllm" in names
