"""Real wheels, downloaded once into build/wheels, and the overlay's own."""

import subprocess
import sys
from pathlib import Path

from overlay.source import Overlay
from series.wheel import wheel as build

from support.sites import OVERLAY, REPO

FOLDER = REPO / "build" / "wheels"
#: Imports a module by its path.
LOAD = """
import importlib.util as util, sys
spec = util.spec_from_file_location("version", sys.argv[1])
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.__version__)
"""


def wheel(requirement: str) -> Path:
    """The wheel of ``requirement`` for this machine, from the package index."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(FOLDER.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(FOLDER), requirement], check=True)
    (file,) = FOLDER.glob(pattern)
    return file


def ours(folder: Path, overlay: Overlay = OVERLAY) -> Path:
    """Build the wheel of an overlay, by default this checkout's, in a directory. Returns: it."""
    name, data = build(overlay, overlay.pin.overlay, 1_700_000_000)
    (folder / name).write_bytes(data)
    return folder / name
