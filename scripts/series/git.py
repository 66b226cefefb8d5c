"""Run git without the user's configuration and attributes."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from overlay.errors import Exit, OverlayError

_SETTINGS = (
    *("-c", "core.autocrlf=false", "-c", "safe.directory=*"),
    *("-c", f"core.attributesFile={os.devnull}", "-c", f"core.excludesFile={os.devnull}"),
)
_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_NO_REPLACE_OBJECTS": "1",
}


def call(
    folder: Path,
    arguments: Sequence[str],
    input: bytes = b"",
    succeeded: Callable[[int], bool] = lambda code: code == 0,
    next_step: str = "delete build/edit and lay it out again, or mend the tree with git",
) -> tuple[bytes, int]:
    """Run git in a repository's root, or in no repository; return its output and exit code.

    ``succeeded`` tells of an exit code whether it is an answer. ``next_step`` is the advice if git
    fails.

    Raises:
        OverlayError: git is not installed, or has failed.
    """
    outer = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        child = subprocess.run(
            ["git", *_SETTINGS, *arguments],
            cwd=folder,
            input=input,
            capture_output=True,
            check=False,
            env=outer | _ENVIRONMENT | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
        )
    except FileNotFoundError:
        raise OverlayError(
            Exit.USAGE, "git is not installed", next_step="install git and run it again"
        ) from None
    if not succeeded(child.returncode):
        message = child.stderr.decode(errors="replace").strip()
        raise OverlayError(
            Exit.FAULT,
            f"git {arguments[0]} failed: {message}",
            subject=folder,
            next_step=next_step,
        )
    return child.stdout, child.returncode


def data(tree: Path, *arguments: str, input: bytes = b"") -> bytes:
    """Run git in a repository, and return its output; errors as for :func:`call`."""
    return call(tree, arguments, input)[0]


def text(tree: Path, *arguments: str, input: str = "") -> str:
    """Run git in a repository, and return its output without the line feeds at its end."""
    return data(tree, *arguments, input=input.encode()).decode().rstrip("\n")


def run(arguments: Sequence[str], files: Mapping[str, bytes], most: int) -> tuple[bytes, int]:
    """Run git on files in no repository, by plain name, as :func:`call` does.

    ``most`` is the highest exit code that is an answer; above it, git has failed.
    """
    with tempfile.TemporaryDirectory(prefix="overlay-git-") as scratch:
        for name, content in files.items():
            (Path(scratch) / name).write_bytes(content)
        return call(
            Path(scratch),
            arguments,
            succeeded=lambda code: 0 <= code <= most,
            next_step="see what git says",
        )
