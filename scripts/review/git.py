"""git on texts that are in no repository."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay.author import environment
from overlay.errors import Exit, OverlayError


def run(arguments: Sequence[str], files: Mapping[str, bytes], most: int) -> tuple[bytes, int]:
    """Run git among a few files; what it prints, and its exit code.

    Args:
        arguments: the command.
        files: what is there, by plain name.
        most: the highest exit code that is an answer; above it, git has failed.

    Raises:
        OverlayError: git is not there, or has failed.
    """
    with tempfile.TemporaryDirectory(prefix="overlay-review-") as scratch:
        for name, data in files.items():
            (Path(scratch) / name).write_bytes(data)
        try:
            child = subprocess.run(
                ["git", *arguments],
                cwd=scratch,
                capture_output=True,
                check=False,
                env=environment() | {"GIT_CEILING_DIRECTORIES": str(Path(scratch).parent)},
            )
        except FileNotFoundError:
            raise OverlayError(
                Exit.USAGE, "git is not installed", next_step="install git and run it again"
            ) from None
    if not 0 <= child.returncode <= most:
        said = child.stderr.decode(errors="replace").strip()
        raise OverlayError(
            Exit.FAULT, f"git {arguments[0]} failed: {said}", next_step="see what git says"
        )
    return child.stdout, child.returncode
