"""Installations to work on, made from the real vLLM of the shared environment."""

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import vllm
from overlay import cli
from overlay.source import Overlay

REPO = Path(__file__).resolve().parents[2]
OVERLAY = Overlay.load(REPO)
UPSTREAM = Path(vllm.__file__).parents[1]
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: The release that the overlay is for; tests name no other unless its number is the point.
RELEASE = OVERLAY.pin.release
INFO = next(UPSTREAM.glob(f"vllm*-{RELEASE}.dist-info")).name

#: Variables of a shell that the tool reads.
AMBIENT = ("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "FORCE")

#: The other files that are read to find an installation.
_NEEDED = ("vllm/__init__.py", "vllm/_version.py", "vllm/v1/__init__.py")


def small(site: Path) -> Path:
    """A copy of the real installation, cut down to the files that the tool reads."""
    for path in (*_NEEDED, *OVERLAY.targets):
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(UPSTREAM / path, site / path)
    shutil.copytree(UPSTREAM / INFO, site / INFO)
    return site


def venv(folder: Path, *options: str, python: str = sys.executable) -> Path:
    """Make a virtual environment without pip. Returns: its site-packages."""
    subprocess.run([python, "-m", "venv", "--without-pip", *options, str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    return site


def script(file: Path, text: str) -> Path:
    """Write a shell script. Returns: its path."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def prefix(folder: Path) -> Path:
    """Make a Python that is no virtual environment, as conda does. Returns: its site-packages.

    Its library is links to this one's, without the installed packages.
    """
    library = folder / "lib" / VERSION
    (library / "site-packages").mkdir(parents=True)
    for path in Path(sysconfig.get_path("stdlib")).iterdir():
        if not path.name.endswith("-packages"):
            (library / path.name).symlink_to(path)
    for shared in Path(sys.base_prefix, "lib").glob("libpython*"):
        (folder / "lib" / shared.name).symlink_to(shared)
    (folder / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), folder / "bin" / "python")
    (folder / "bin" / VERSION).symlink_to("python")
    return library / "site-packages"


def shorten_record(site: Path) -> None:
    """Remove 99 of 100 rows of absent files from RECORD.

    For hundreds of runs that do not depend on its length: half of the time of a run is
    spent on its 275 kB.
    """
    record = site / INFO / "RECORD"
    rows = enumerate(record.read_text().splitlines(keepends=True))
    kept = [row for n, row in rows if n % 100 == 0 or (site / row.split(",")[0]).exists()]
    record.write_text("".join(kept))


def whole(site: Path, bytecode: bool = False) -> Path:
    """A copy of the real installation in which every file is a hard link, as uv makes them.

    Args:
        site: the directory to make.
        bytecode: whether it has what bytecode there is, too, which is valid there: a hard link has
            its file's time.
    """
    left_out = shutil.ignore_patterns("*.pyc.*" if bytecode else "__pycache__")
    site.mkdir(parents=True)
    for name in ("vllm", INFO):
        shutil.copytree(
            UPSTREAM / name,
            site / name,
            copy_function=os.link,
            ignore=left_out,
        )
    return site


@contextmanager
def in_memory(folder: Path, room: int) -> Iterator[Path]:
    """A directory in memory, where programs start and ``room`` bytes are free; else ``folder``."""
    memory = Path("/dev/shm")
    if (
        not os.access(memory, os.W_OK)
        or os.statvfs(memory).f_flag & os.ST_NOEXEC
        or shutil.disk_usage(memory).free < room
    ):
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="readiness-", dir=memory) as made:
            yield Path(made)


Snapshot = dict[str, tuple[int, bytes | str]]


def snapshot(root: Path, bytecode: bool = False) -> Snapshot:
    """The mode and contents of every file, link and directory below ``root``, by path.

    Bytecode is left out unless asked for, because it holds its source's time.
    """
    entries: Snapshot = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if "__pycache__" in path.parts and not bytecode:
            continue
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entries[name] = (mode, f"link to {path.readlink()}")
        elif stat.S_ISDIR(mode):
            entries[name] = (mode, "directory")
        else:
            entries[name] = (mode, path.read_bytes())
    return entries


def tool() -> Path:
    """The program by its directory, in the checkout of the overlay that the command line lays.

    A synthetic overlay gets a copy of the program and of the Makefile.
    """
    folder = cli.ROOT / "scripts" / "overlay"
    if not folder.exists():
        shutil.copytree(REPO / "scripts" / "overlay", folder)
        shutil.copy(REPO / "Makefile", cli.ROOT)
    return folder


def run(
    *arguments: object, python: str = sys.executable, code: int | None = None, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run the overlay tool, which has to exit with ``code``, if one is given.

    With options of a process, it runs as in a Dockerfile, by its directory. Without them it runs
    in this process, which takes half of the time.
    """
    if options or python != sys.executable:
        done = _run([python, tool(), *arguments], **options)
    else:
        done = _here([str(argument) for argument in arguments])
    assert code is None or done.returncode == code, f"{arguments}: {done.stdout}{done.stderr}"
    return done


def _here(command: list[str]) -> "subprocess.CompletedProcess[str]":
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace") for _ in "oe")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        for name in AMBIENT:
            patch.delenv(name, raising=False)
        if sys.executable in command:  # engines of other tests, which it runs, are in the way
            patch.setenv("FORCE", "1")
        code = cli.main(command)
    printed = []
    for stream in (output, errors):
        stream.seek(0)
        printed.append(stream.read())
    return subprocess.CompletedProcess(command, code, *printed)


def status(site: Path) -> Any:
    """Return the report of ``status --json``."""
    return json.loads(run("status", "--site", site, "--json").stdout)


def run_package(
    name: str, *arguments: Any, root: Path = REPO, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a program as the Makefile does, as a package."""
    env = {"PYTHONPATH": str(root / "scripts"), "PYTHONSAFEPATH": "1"} | options.pop("env", {})
    return _run([sys.executable, "-m", name, *arguments], env=env, **options)


def _run(command: Sequence[object], **options: Any) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if k not in AMBIENT}
    env |= options.pop("env", {})
    return subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, env=env, **options
    )
