"""Real wheels, downloaded once into build/wheels."""

import subprocess
import sys
from pathlib import Path

from support.sites import REPO

FOLDER = REPO / "build" / "wheels"


def wheel(requirement: str) -> Path:
    """The wheel of ``requirement`` for this machine, from the package index."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(FOLDER.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(FOLDER), requirement], check=True)
    (file,) = FOLDER.glob(pattern)
    return file
