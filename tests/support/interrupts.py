"""Ctrl-C at a chosen moment of a program's start."""

import os
from pathlib import Path

#: Raises SIGINT as the N-th module is looked for, counted from the program's first.
_INTERRUPT = """
import os, signal, sys

class Cut:
    left = None

    def find_spec(self, name, *_):
        start = name.rpartition(".")[2] == "__main__"
        if start or (self.left is None and sys.argv[0].endswith(".py")):
            self.left = int(os.environ["CUT"])
        if self.left is not None and not start:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Cut())
"""


def environment(folder: Path, at: int) -> dict[str, str]:
    """For a program that is to be interrupted at its import number ``at``."""
    early = folder / "early"
    early.mkdir(exist_ok=True)
    (early / "sitecustomize.py").write_text(_INTERRUPT)
    return {**os.environ, "PYTHONPATH": str(early), "CUT": str(at)}
