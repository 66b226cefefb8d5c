"""The wheel's command, installed by real installers, without a checkout, git or make."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import mini, sites
from support.sites import REPO, snapshot
from support.wheels import ours

ENV = Path(sys.executable).parent
COMMAND = "readiness-overlay"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a synthetic overlay, with the real tool."""
    overlay = mini.worded(tmp_path_factory.mktemp("overlay"))
    shutil.copytree(REPO / "scripts", overlay.root / "scripts")
    shutil.copy(REPO / "LICENSE", overlay.root)
    return ours(tmp_path_factory.mktemp("dist"), overlay)


def environment(folder: Path) -> Path:
    """Make a virtual environment with the synthetic vLLM. Returns: its directory."""
    mini.install(sites.venv(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave on PATH the two programs that start a script of uvx, without git and make."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("dirname", "realpath"):
        (folder / name).symlink_to(shutil.which(name) or "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(folder))
        yield


def run(*words: object, **variables: object) -> "subprocess.CompletedProcess[str]":
    """Run a command in an environment of three variables and those that are named."""
    env = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {name: str(value) for name, value in variables.items()}
    command = [*map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd="/")


def install(venv: Path, file: Path) -> Path:
    """Install the wheel by pip. Returns: the command."""
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    done = run(*pip, "install", "--no-index", "--no-compile", file)
    assert done.returncode == 0, done.stderr
    return venv / "bin" / COMMAND


def test_it_patches_the_environment_that_it_runs_from(tmp_path: Path, file: Path) -> None:
    venv = environment(tmp_path / "venv")
    (site,) = venv.glob("lib/python3*/site-packages")
    stock = snapshot(site)
    command = install(venv, file)
    other = environment(tmp_path / "other")
    for start in ([command], [venv / "bin" / "python", "-m", "readiness_overlay"]):
        version = f"{COMMAND} 0.0.1 for vLLM {mini.RELEASE}\n"
        assert run(*start, "--version").stdout == version
    pristine = run(command, "verify")
    assert pristine.returncode == Exit.PRISTINE
    assert pristine.stderr.endswith(f"; next: run `{COMMAND} apply`\n")
    done = run(command, "apply", VIRTUAL_ENV=other)
    assert done.returncode == Exit.DONE, done.stderr
    assert done.stderr == f"{COMMAND} apply: {venv} (this command runs from it)\n"
    assert run(command, "verify", "--venv", other).returncode == Exit.PRISTINE
    status = run(command, "status").stdout
    assert f"uninstalling {COMMAND} leaves the overlay on: `{COMMAND} revert` first" in status
    sites.script(venv / "bin" / "vllm", 'echo served "$@"')
    served = run(command, "exec", "--", "vllm", "serve", "MODEL")
    assert (served.stdout, served.stderr) == ("served serve MODEL\n", "")
    assert run(command, "revert").returncode == Exit.DONE
    assert {name: each for name, each in snapshot(site).items() if name in stock} == stock


def test_only_an_overlay_that_is_on_is_said_to_stay(tmp_path: Path, file: Path) -> None:
    venv = environment(tmp_path / "venv")
    (site,) = venv.glob("lib/python3*/site-packages")
    command = install(venv, file)
    module = site / "vllm/one.py"
    kept = module.read_bytes()
    for overlaid in (False, True):
        if overlaid:
            assert run(command, "apply").returncode == Exit.DONE
        module.write_bytes(module.read_bytes() + b"# other\n")
        status = run(command, "status")
        assert status.returncode == Exit.FOREIGN
        assert ("leaves the overlay on" in status.stdout) is overlaid
        module.write_bytes(kept)


def test_a_gate_beside_no_vllm_says_that_it_is_absent(tmp_path: Path, file: Path) -> None:
    sites.venv(tmp_path / "venv")
    command = install(tmp_path / "venv", file)
    assert run(command, "verify").returncode == Exit.ABSENT
    assert run(command, "exec", "--", "dirname", "/").returncode == Exit.ABSENT
    assert run(command, "status").returncode == Exit.USAGE


def test_an_uninstalled_command_leaves_what_another_copy_reverts(
    tmp_path: Path, file: Path
) -> None:
    venv = environment(tmp_path / "venv")
    (site,) = venv.glob("lib/python3*/site-packages")
    stock = snapshot(site)
    assert run(install(venv, file), "apply").returncode == Exit.DONE
    pip = [sys.executable, "-m", "pip", "--python", venv / "bin" / "python"]
    assert run(*pip, "uninstall", "--yes", COMMAND).returncode == 0
    assert list(site.glob("readiness_overlay*")) == []
    tool = [*uvx(tmp_path), file]
    assert run(*tool, "verify", "--venv", venv).returncode == Exit.DONE
    done = run(*tool, "revert", "--venv", venv)
    assert done.returncode == Exit.DONE, done.stderr
    assert snapshot(site) == stock


def uvx(folder: Path) -> Sequence[object]:
    options = ["--quiet", "--offline", "--cache-dir", folder / "cache"]
    return [ENV / "uv", *options, "tool", "run", "--python", sys.executable]


def pipx(folder: Path, file: Path) -> Sequence[object]:
    names = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "PIPX_MAN_DIR": "man"}
    env = {name: str(folder / value) for name, value in names.items()}
    options = ["--backend", "uv", "--python", sys.executable]
    path = f"{ENV}:{os.environ['PATH']}"  # pipx starts uv.
    done = run(ENV / "pipx", "install", *options, file, PATH=path, **env)
    assert done.returncode == 0, done.stderr
    return [folder / "bin" / COMMAND]


@pytest.mark.parametrize("installer", ["uvx", "pipx"])
def test_from_an_environment_of_its_own_it_takes_the_active_one(
    tmp_path: Path, file: Path, installer: str
) -> None:
    venv = environment(tmp_path / "venv")
    tool = [*uvx(tmp_path), file] if installer == "uvx" else pipx(tmp_path, file)
    for command in (["verify"], ["exec", "--", "dirname", "/"]):
        assert run(*tool, *command).returncode == Exit.ABSENT
    for command in (["status"], ["apply"]):
        refused = run(*tool, *command)
        assert refused.returncode == Exit.USAGE
    assert "no target is named and no virtual environment is active" in refused.stderr
    assert "(--venv=DIR)" in refused.stderr
    done = run(*tool, "apply", VIRTUAL_ENV=venv)
    assert done.returncode == Exit.DONE, done.stderr
    assert f"{COMMAND} apply: {venv} (named by VIRTUAL_ENV)\n" in done.stderr
    for command in (["verify"], ["exec", "--", "dirname", "/"], ["status"]):
        assert run(*tool, *command, VIRTUAL_ENV=venv).returncode == Exit.DONE
    assert run(*tool, "revert", "--python", venv / "bin" / "python").returncode == Exit.DONE
    again = run(*tool, "verify", "--venv", venv)
    assert f"next: run `{COMMAND} apply --venv={venv}`" in again.stderr
