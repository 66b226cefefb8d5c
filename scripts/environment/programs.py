"""Find or install the programs that tests need beside Python. Standard library only."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environment.children import children_environment

#: Packages that are not installed, but unpacked: their services must not start.
UNPACKED = Path(__file__).resolve().parents[2] / "build" / "programs"
_APT = ("apt-get", "-o", "DPkg::Lock::Timeout=120")
_BARE = ("--no-install-recommends",)


class Failure(Exception):
    """An error that a person has to resolve."""


@dataclass(frozen=True)
class Program:
    """A program, by its name, which its package in Debian has, too.

    Attributes:
        purpose: what the tests do with it.
        linked: whether it may need libraries that are not installed. They are unpacked, too,
            and it is told where they are.
    """

    name: str
    purpose: str
    linked: bool = False

    @property
    def _variable(self) -> str:
        """The environment's variable that may name one."""
        return self.name.upper()

    def find(self) -> str | None:
        """The path of one that starts: the variable's, one on PATH, or one unpacked; or None.

        Raises:
            Failure: the variable names something that does not start.
        """
        if named := os.environ.get(self._variable):
            if program := _starts(named):
                return program
            raise Failure(f"{self._variable}={named} does not start; name another one, or unset it")
        return _starts(self.name) or _starts(str(UNPACKED / "usr" / "bin" / self.name))

    def ensure(self) -> str:
        """Return its path; unpack its package if need be, on Debian and derivatives, as any user.

        Raises:
            Failure: there is none, and its package cannot be had.
        """
        if program := self.find():
            return program
        if shutil.which(_APT[0]):
            where = f"unpacking it in {UNPACKED} (apt-get, {self.name})"
            print(f"the tests {self.purpose}: {where}", flush=True)
            if not self._unpack() and os.geteuid() == 0:  # The package lists may be old or absent.
                subprocess.run([*_APT, "update"], check=False)
                self._unpack()
            if program := self.find():
                return program
        raise Failure(
            f"the tests {self.purpose}, and there is none that starts. Install it (Debian: "
            f"apt-get install {self.name}, as root), or name one with "
            f"{self._variable}=/path/to/it, and run it again"
        )

    def _unpack(self) -> bool:
        libraries = _missing_libraries(self.name) if self.linked else []
        tools = ["patchelf"] if libraries else []
        UNPACKED.mkdir(parents=True, exist_ok=True)
        return (
            _run([*_APT, "download", self.name, *libraries, *tools], UNPACKED)
            and all(map(_unpack, sorted(UNPACKED.glob("*.deb"))))
            and (not libraries or _link(UNPACKED / "usr" / "bin" / self.name))
        )


PROMETHEUS = Program("prometheus", "let a Prometheus scrape a server")
BUILDAH = Program("buildah", "build container images", linked=True)
#: What `make test` needs.
TESTS = (PROMETHEUS, BUILDAH)


def _run(command: Sequence[str], folder: Path | None = None) -> bool:
    environment = children_environment() | {"DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, cwd=folder, check=False, env=environment).returncode == 0


def _unpack(archive: Path) -> bool:
    if done := _run(["dpkg", "-x", archive.name, "."], archive.parent):
        archive.unlink()  # Unpacked once more, a program would lose its link.
    return done


def _missing_libraries(package: str) -> list[str]:
    """The packages of libraries that apt-get would install for this one."""
    simulated = subprocess.run(
        [*_APT, "install", *_BARE, "--simulate", package],
        capture_output=True,
        text=True,
        check=False,
        env=children_environment() | {"LC_ALL": "C"},
    )
    # A package that would be upgraded has its present version there, in brackets.
    return re.findall(r"^Inst (lib\S+) \(", simulated.stdout, re.MULTILINE)


def _link(program: Path) -> bool:
    """Write into a program that its libraries are in :data:`UNPACKED`.

    A variable would not do: buildah starts itself again, and not with all variables.
    """
    folders = [f for lib in ("lib", "usr/lib") for f in UNPACKED.glob(f"{lib}/*-linux-*")]
    path = ":".join(map(str, folders))
    patchelf = UNPACKED / "usr" / "bin" / "patchelf"
    # Unlike RUNPATH, RPATH holds for the libraries of libraries, too.
    return _run([str(patchelf), "--force-rpath", "--set-rpath", path, str(program)])


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
