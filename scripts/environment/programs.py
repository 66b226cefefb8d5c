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
_BARE = ("--no-install-recommends",)
#: Value of a program's variable that forbids to look for one or to install one.
NONE = "none"


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
        linked: whether an unpacked one may need libraries that are not installed. They are
            unpacked, too, and it is told where they are.
        dispensable: whether tests that need it are left out without it.
    """

    names: tuple[str, ...]
    package: str
    purpose: str
    variable: str
    unpacked: bool = False
    linked: bool = False
    dispensable: bool = False

    @property
    def lacking(self) -> str:
        """The reason why tests are skipped without the program."""
        return f"no {self.package} that starts: install one, or name it with {self.variable}="

    def find(self) -> str | None:
        """The path of one that starts: the variable's, or the first of the names, or None.

        Raises:
            Failure: the variable names something that does not start.
        """
        named = os.environ.get(self.variable)
        if named == NONE:
            return None
        if named:
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
        wanted = os.environ.get(self.variable) != NONE
        if wanted and shutil.which(_APT[0]) and (root or self.unpacked):
            where = (
                f"unpacking it in {UNPACKED}"
                if self.unpacked
                else (f"installing it on this system as root, unless {self.variable}={NONE}")
            )
            print(f"the tests {self.purpose}: {where} (apt-get, {self.package})", flush=True)
            if not self._install() and root:  # The package lists may be old or absent.
                subprocess.run([*_APT, "update"], check=False)
                self._install()
            if program := self.find():
                return program
        raise Failure(
            f"the tests {self.purpose}, and there is none that starts. Install it (Debian: "
            f"apt-get install {self.package}, as root), or name one with "
            f"{self.variable}=/path/to/it, and run it again"
        )

    def _install(self) -> bool:
        if not self.unpacked:
            return _run([*_APT, "install", "-y", *_BARE, self.package])
        libraries = _missing_libraries(self.package) if self.linked else []
        tools = ["patchelf"] if libraries else []
        UNPACKED.mkdir(parents=True, exist_ok=True)
        return (
            _run([*_APT, "download", self.package, *libraries, *tools], UNPACKED)
            and all(map(_unpack, sorted(UNPACKED.glob("*.deb"))))
            and (not libraries or _link(UNPACKED / "usr" / "bin" / self.names[0]))
        )


CHROMIUM = Program(
    ("chromium", "chromium-browser", "google-chrome"),
    "chromium",
    "open pages in a Chromium",
    "CHROMIUM",
    dispensable=True,
)
PROMETHEUS = Program(
    ("prometheus",), "prometheus", "let a Prometheus scrape a server", "PROMETHEUS", unpacked=True
)
BUILDAH = Program(
    ("buildah",), "buildah", "build container images", "BUILDAH", unpacked=True, linked=True
)
RUNC = Program(("runc",), "runc", "run containers", "RUNC", unpacked=True, linked=True)
#: What `make test` needs.
TESTS = (CHROMIUM, PROMETHEUS, BUILDAH, RUNC)


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
