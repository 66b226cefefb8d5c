"""The Chromium that opens pages in the tests. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess

from overlay.launch import children_environment

NAMES = ("chromium", "chromium-browser", "google-chrome")
#: A page is opened by whoever runs the tests, root in a container too, and talks to nobody.
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
    """Something that a person has to mend first."""


def find() -> str | None:
    """A Chromium that starts: $CHROMIUM, or the first of :data:`NAMES` on the path.

    Raises:
        Failure: $CHROMIUM names something that does not start.
    """
    if named := os.environ.get("CHROMIUM"):
        if found := _starts(named):
            return found
        raise Failure(f"CHROMIUM={named} does not start; name another one, or unset it")
    return next(filter(None, map(_starts, NAMES)), None)


def ensure() -> str:
    """Find a Chromium; root on Debian and its like gets one installed where there is none.

    Raises:
        Failure: there is none, and it cannot be installed from here.
    """
    if found := find():
        return found
    if shutil.which(_APT[0]) and os.geteuid() == 0:
        print("installing chromium, in which the tests open pages", flush=True)
        if not _install():  # its lists may be old, or not there
            subprocess.run([*_APT, "update"], check=False)
            _install()
        if found := find():
            return found
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
    """Where the program is; None if it is not there, or is a stub that starts nothing."""
    found = shutil.which(name)
    if found is None:
        return None
    try:
        done = subprocess.run([found, "--version"], capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else found
