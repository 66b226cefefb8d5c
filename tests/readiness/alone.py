"""Programs that import our modules without vLLM's, which take seconds."""

import os
import subprocess
import sys
from pathlib import Path

from vllm.v1.readiness.engine import switch

PACKAGE = str(Path(switch.__file__).parents[3])

#: The beginning of such a program.
ALONE = f"""
import logging, os, sys, time, types
for name, path in (("vllm", {PACKAGE!r}), ("vllm.v1", {PACKAGE + "/v1"!r}), ("vllm.logger", "")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.modules["vllm.logger"].init_logger = logging.getLogger
"""


def run_alone(program: str, **environment: str) -> str:
    """Run a program in an environment without our variables, and return its output."""
    clean = {name: value for name, value in os.environ.items() if name != switch.PROBE}
    return subprocess.run(
        [sys.executable, "-c", ALONE + program],
        capture_output=True,
        text=True,
        check=True,
        env=clean | environment,
    ).stdout.strip()
