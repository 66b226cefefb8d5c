"""Copies of this checkout, and make and git in them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from overlay.errors import Exit
from overlay.pin import PACKAGE
from series import errata

from support.sites import OVERLAY, REPO, UPSTREAM, run_package


def make(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run make in this checkout, or in -C, as if nothing were named or active."""
    named = {"VENV", "SITE", "PYTHON", "VIRTUAL_ENV", "FORCE", "MAKEFLAGS", "MAKELEVEL"}
    named |= {"CONDA_PREFIX", "PYTHON3", "WHEEL", "UV", "FILE"}
    env = {k: v for k, v in os.environ.items() if k not in named}
    return subprocess.run(
        ["make", "--no-print-directory", f"PYTHON3={sys.executable}", *arguments],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=env | environment,
    )


def git(
    folder: Path, *arguments: str, input: str = "", code: int | None = 0
) -> "subprocess.CompletedProcess[str]":
    """Run git in a directory; it has to exit with ``code``, if one is given."""
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *arguments],
        cwd=folder,
        input=input,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_EDITOR": "true"},
    )
    assert code is None or done.returncode == code, done.stderr
    return done


def checkout(root: Path) -> Path:
    """A copy of the files of an archive, without vendored copies, git and pyproject.toml."""
    (root / "docs").mkdir(parents=True)
    for name in ("LICENSE", "Makefile", "VERSION_PIN", "patches", "scripts", errata.PAGE):
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, root / name)
    ours = f"vendor_overlay/{PACKAGE}"
    shutil.copytree(REPO / ours, root / ours)
    return root


def archive(root: Path) -> Path:
    """Make the archive of this working tree, as `make dist` does; return its directory."""
    checkout(root)
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        git(root, *command)
    git(root, "tag", f"v{OVERLAY.pin.overlay}")  # The page names the archive of a release.
    done = run_package("series", "dist", "--site", UPSTREAM, root=root)
    assert done.returncode == Exit.DONE, done.stderr
    return root / "build" / "dist"


def library(folder: Path) -> Path:
    """The site-packages directory of an environment."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return folder / "lib" / version / "site-packages"
