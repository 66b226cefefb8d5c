"""Mounts that last for a test; it is skipped where mounting is not permitted."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mount on ``folder``, as ``mount OPTIONS folder`` does."""
    done = subprocess.run(["mount", *options, folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def bound(path: Path, read_only: bool = False) -> Iterator[None]:
    """Make a file or directory a mount of its own."""
    with mounted(path, "--bind", str(path)):
        if read_only:
            subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield
