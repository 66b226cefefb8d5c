"""Where vLLM may be installed, as the table of docs/operations.md has it: each row is tried.

Installers are real, but for conda, which is not to be had from a package index. The wheel is that
of a synthetic vLLM; tests/overlay/test_wheels.py has the real one.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support import mini, mounts, nobody, sites
from support.sites import REPO, run

pytestmark = pytest.mark.usefixtures("worded")
ENV = Path(sys.executable).parent
DEBIAN = Path("/usr/bin/python3")
COMMANDS = ("apply", "verify", "exec", "status")
#: The rows that tests/overlay/test_containers.py and tests/overlay/test_command.py try.
ELSEWHERE = {
    "a layer of an image (`RUN`, as root)": [0, 0, 0, 0],
    "an image overlaid before, run by any user, read-only or not": [0, 0, 0, 0],
    "beside [the wheel](#the-wheel), by its command": [0, 0, 0, 0],
    "active, the wheel by `uvx` or `pipx`": [0, 0, 0, 0],
    "neither named nor active, the wheel by `uvx` or `pipx`": [2, 3, 3, 2],
}

#: Runs a command on the target, and returns its exit code.
Attempt = Callable[[str], int]


def table() -> dict[str, list[int]]:
    """By environment, the documented exit code of each of :data:`COMMANDS`, one after another."""
    page = (REPO / "docs" / "operations.md").read_text()
    _, _, rest = page.partition("\n| where vLLM is | ")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]
    codes = {name: [int(re.findall(r"^\d", cell)[0]) for cell in cells] for name, _, *cells in rows}
    assert all(codes.pop(name) == row for name, row in ELSEWHERE.items())
    return codes


def install(*words: object, env: Mapping[str, str] | None = None) -> str:
    """Run an installer. Returns: what it prints."""
    command = list(map(str, words))
    clean = {name: value for name, value in os.environ.items() if name not in sites.AMBIENT}
    clean["PATH"] = f"{ENV}:{clean['PATH']}"
    done = subprocess.run(
        command, env=clean | dict(env or {}), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def install_vllm(folder: Path, *options: object, before: Sequence[object] = ()) -> None:
    """Install the wheel, which is made in ``folder``, by uv."""
    install(*before, "uv", "pip", "install", *options, mini.wheel(folder))


def words(command: str, *target: object) -> list[str]:
    ran = ["--", "true"] if command == "exec" else []
    return [command, *map(str, target), *ran]


def tool(*target: object) -> Attempt:
    """Run a command as this user."""
    return lambda command: run(*words(command, *target), cwd="/").returncode


def made(*command: str) -> Callable[[Path], AbstractContextManager[Attempt]]:
    @contextmanager
    def make(folder: Path) -> Iterator[Attempt]:
        install(*command, folder / "venv")
        install_vllm(folder, "--python", folder / "venv" / "bin" / "python")
        yield tool("--venv", folder / "venv")

    return make


@contextmanager
def by_conda(folder: Path) -> Iterator[Attempt]:
    """A Python as conda lays it out, and the directory of conda's records."""
    mini.install(sites.prefix(folder / "conda"))
    (folder / "conda" / "conda-meta").mkdir()
    (folder / "conda" / "conda-meta" / "history").write_text("")
    yield tool("--venv", folder / "conda")


@contextmanager
def by_debian(folder: Path) -> Iterator[Attempt]:
    """With a directory of the test's where pip installs, in a mount namespace of its own."""
    ask = [str(DEBIAN), "-I", "-c", "import site; print(site.getsitepackages()[0])"]
    where = subprocess.check_output(ask, text=True).strip() if DEBIAN.exists() else ""
    if not where.endswith("dist-packages"):
        pytest.skip("Debian's Python is not there")
    (folder / "packages").mkdir()
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    shell = ["unshare", "--mount", "sh", "-c", script]
    inside: list[str | Path] = [*shell, folder / "packages", where]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted")
    install_vllm(folder, "--python", DEBIAN, "--break-system-packages", before=inside)
    assert (folder / "packages" / "vllm").is_dir()

    def attempt(command: str) -> int:
        overlay = [*inside, sys.executable, sites.tool()]
        line = [*overlay, *words(command, "--python", DEBIAN)]
        return subprocess.run(line, capture_output=True, check=False).returncode

    yield attempt


@contextmanager
def by_user(folder: Path) -> Iterator[Attempt]:
    base = {"PYTHONUSERBASE": str(folder / "user")}
    python = os.path.realpath(sys.executable)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--user"]
    install(*pip, mini.wheel(folder), env=base)
    yield lambda command: run(*words(command, "--python", python), env=base).returncode


@contextmanager
def by_target(folder: Path) -> Iterator[Attempt]:
    install_vllm(folder, "--target", folder / "target", "--python", sys.executable)
    yield tool("--site", folder / "target")


@contextmanager
def by_uv_tool(folder: Path) -> Iterator[Attempt]:
    env = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    options = ["--no-index", "--python", sys.executable]
    install("uv", "tool", "install", *options, mini.wheel(folder), env=env)
    yield tool("--venv", Path(install("uv", "tool", "dir", env=env)) / "vllm")


@contextmanager
def by_pipx(folder: Path) -> Iterator[Attempt]:
    names = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man"}
    env = {name: str(folder / value) for name, value in names.items()}
    install("pipx", "install", "--backend", "uv", mini.wheel(folder), env=env)
    venvs = install("pipx", "environment", "--value", "PIPX_LOCAL_VENVS", env=env)
    yield tool("--venv", Path(venvs) / "vllm")


def read_only(overlaid: bool) -> Callable[[Path], AbstractContextManager[Attempt]]:
    @contextmanager
    def make(folder: Path) -> Iterator[Attempt]:
        site = mini.install(folder / "site")
        if overlaid:
            assert run("apply", "--site", site).returncode == 0
        with mounts.bound(site, read_only=True):
            yield tool("--site", site)

    return make


def not_root(owner: bool, overlaid: bool) -> Callable[[Path], AbstractContextManager[Attempt]]:
    @contextmanager
    def make(folder: Path) -> Iterator[Attempt]:
        site = mini.install(folder / "site")
        if overlaid:
            assert run("apply", "--site", site).returncode == 0
        nobody.admit(folder)
        for path in (site, *site.rglob("*")) if owner else ():
            os.chown(path, nobody.ID, nobody.ID)
        yield lambda command: nobody.run(folder, *words(command, "--site", site))[0]

    return make


ENVIRONMENTS = {
    "a virtual environment of `venv`": made(sys.executable, "-m", "venv", "--without-pip"),
    "a virtual environment of `uv venv`": made("uv", "venv", "--python", sys.executable),
    "a conda environment": by_conda,
    "Debian's or Ubuntu's Python (`--break-system-packages`)": by_debian,
    "a user's packages (`pip install --user`)": by_user,
    "a `--target` directory": by_target,
    "a `uv tool`": by_uv_tool,
    "a `pipx` environment": by_pipx,
    "a read-only file system": read_only(overlaid=False),
    "a read-only file system, overlaid before": read_only(overlaid=True),
    "your own files, without root": not_root(owner=True, overlaid=False),
    "another user's files, without root": not_root(owner=False, overlaid=False),
    "another user's files, overlaid by that user": not_root(owner=False, overlaid=True),
}
#: The environments that only root can make.
ROOTS = (by_debian, *(make for name, make in ENVIRONMENTS.items() if " file" in name))


def test_each_row_is_tried() -> None:
    assert table().keys() == ENVIRONMENTS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if make is by_user else ())
        for name, make in ENVIRONMENTS.items()
    ],
)
def test_an_environment(tmp_path: Path, name: str) -> None:
    make = ENVIRONMENTS[name]
    if make in ROOTS and os.geteuid() != 0:
        pytest.skip("only root may mount, and be somebody else")
    with make(tmp_path) as attempt:
        assert [attempt(command) for command in COMMANDS] == table()[name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may lock a directory for somebody else")
@pytest.mark.parametrize("command", ["verify", "status", "exec"])
def test_an_interpreter_that_cannot_be_reached_is_not_needed(tmp_path: Path, command: str) -> None:
    """As when an environment was made with a Python in another user's home."""
    environment = tmp_path / "venv"
    site = mini.install(environment / "lib" / sites.VERSION / "site-packages")
    (environment / "pyvenv.cfg").write_text("home = elsewhere\n")
    (tmp_path / "locked").mkdir()
    python = shutil.copy(os.path.realpath(sys.executable), tmp_path / "locked" / "python")
    (environment / "bin").mkdir()
    (environment / "bin" / "python").symlink_to(python)
    assert run("apply", "--site", site).returncode == 0
    nobody.admit(tmp_path)
    (tmp_path / "locked").chmod(0o700)
    for target in (["--site", str(site)], ["--venv", str(environment)]):
        code, error = nobody.run(tmp_path, *words(command, *target))
        assert (code, error) == (0, ""), target
