"""Find or install the programs that tests need beside Python. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from environment.children import children_environment

#: For Chromium: the tests may be run by root in a container, and their pages need no network.
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
#: Packages that are not installed, but unpacked: their services must not start.
UNPACKED = Path(__file__).resolve().parents[2] / "build" / "programs"
_APT = ("apt-get", "-o", "DPkg::Lock::Timeout=120")


class Failure(Exception):
    """An error that a person has to resolve."""


@dataclass(frozen=True)
class Program:
    """A program, and the package that has it.

    Attributes:
        names: under which it may be on PATH, the best first.
        package: Debian's.
        purpose: what the tests do with it.
        variable: of the environment, which may name one.
        unpacked: whether the package is only unpacked, into :data:`UNPACKED`, by any user.
    """

    names: tuple[str, ...]
    package: str
    purpose: str
    variable: str
    unpacked: bool = False

    def find(self) -> str | None:
        """The path of one that starts: the variable's, or the first of the names, or None.

        Raises:
            Failure: the variable names something that does not start.
        """
        if named := os.environ.get(self.variable):
            if program := _starts(named):
                return program
            raise Failure(f"{self.variable}={named} does not start; name another one, or unset it")
        own = [str(UNPACKED / "usr" / "bin" / name) for name in self.names if self.unpacked]
        return next(filter(None, map(_starts, (*self.names, *own))), None)

    def ensure(self) -> str:
        """Find one, or install it, on Debian and its derivatives; as root if not unpacked.

        Returns:
            Its path.

        Raises:
            Failure: there is none, and it cannot be installed.
        """
        if program := self.find():
            return program
        root = os.geteuid() == 0
        if shutil.which(_APT[0]) and (root or self.unpacked):
            print(f"installing {self.package}: the tests {self.purpose}", flush=True)
            install = _unpack if self.unpacked else _install
            if not install(self.package) and root:  # The package lists may be old or absent.
                subprocess.run([*_APT, "update"], check=False)
                install(self.package)
            if program := self.find():
                return program
        raise Failure(
            f"the tests {self.purpose}, and there is none that starts. Install it (Debian: "
            f"apt-get install {self.package}, as root), or name one with "
            f"{self.variable}=/path/to/it, and run it again"
        )


CHROMIUM = Program(
    ("chromium", "chromium-browser", "google-chrome"),
    "chromium",
    "open pages in a Chromium",
    "CHROMIUM",
)
PROMETHEUS = Program(
    ("prometheus",), "prometheus", "let a Prometheus scrape a server", "PROMETHEUS", unpacked=True
)
#: What `make test` needs.
TESTS = (CHROMIUM, PROMETHEUS)


def _install(package: str) -> bool:
    command = [*_APT, "install", "-y", "--no-install-recommends", package]
    environment = children_environment() | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, check=False, env=environment).returncode == 0


def _unpack(package: str) -> bool:
    UNPACKED.mkdir(parents=True, exist_ok=True)
    unpack = ["sh", "-c", "for file in *.deb; do dpkg -x $file .; done"]
    environment = children_environment()
    return not any(
        subprocess.run(command, cwd=UNPACKED, check=False, env=environment).returncode
        for command in ([*_APT, "download", package], unpack)
    )


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
