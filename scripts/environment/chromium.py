"""Find or install the Chromium in which the tests open pages. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess

from environment.children import children_environment

NAMES = ("chromium", "chromium-browser", "google-chrome")
#: The tests may be run by root in a container, and their pages need no network.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_APT = ("apt-get", "-o", "DPkg::Lock::Timeout=120")


class Failure(Exception):
    """An error that a person has to resolve."""


def find() -> str | None:
    """The path of a Chromium that starts: $CHROMIUM, or the first of :data:`NAMES`, or None.

    Raises:
        Failure: $CHROMIUM names something that does not start.
    """
    if named := os.environ.get("CHROMIUM"):
        if program := _starts(named):
            return program
        raise Failure(f"CHROMIUM={named} does not start; name another one, or unset it")
    return next(filter(None, map(_starts, NAMES)), None)


def ensure() -> str:
    """Find a Chromium, or install one, as root on Debian and its derivatives.

    Returns:
        Its path.

    Raises:
        Failure: there is none, and it cannot be installed.
    """
    if program := find():
        return program
    if shutil.which(_APT[0]) and os.geteuid() == 0:
        print("installing chromium, in which the tests open pages", flush=True)
        if not _install():  # The package lists may be old or absent.
            subprocess.run([*_APT, "update"], check=False)
            _install()
        if program := find():
            return program
    raise Failure(
        "the tests open pages in a Chromium, and there is none that starts. Install it (Debian: "
        "apt-get install chromium, as root), or name one with CHROMIUM=/path/to/chrome, and run "
        "it again"
    )


def _install() -> bool:
    command = [*_APT, "install", "-y", "--no-install-recommends", "chromium"]
    environment = children_environment() | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, check=False, env=environment).returncode == 0


def _starts(name: str) -> str | None:
    """The program's path, or None if it does not exist or is a stub that does not start."""
    program = shutil.which(name)
    if program is None:
        return None
    try:
        done = subprocess.run([program, "--version"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else program
