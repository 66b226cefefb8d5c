"""Invalid variables are refused before an engine starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.engine import Engine


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (["-m", "vllm.entrypoints.openai.api_server"], "VLLM_READINESS=-penaltis"),
        pytest.param(["vllm", "serve"], "VLLM_READINESS_SLOTS=many", marks=pytest.mark.slow),
    ],
)
def test_a_command_is_refused_in_one_line(
    command: list[str], variable: str, overlaid: Engine, tmp_path: Path
) -> None:
    """The last one, before an engine is started."""
    (tmp_path / "vllm").write_text("from vllm.entrypoints.cli.main import main\nmain()\n")
    alias = tmp_path / "vllm-0.22.0.dist-info"  # as in the environments that make apply makes
    alias.mkdir()
    (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.0\n")
    done = start([*command, "no model"], variable, overlaid, tmp_path)
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    name, _, value = variable.partition("=")
    assert line.startswith(f"vllm: {name}={value!r}: ")
    assert done.returncode == 1


def test_a_program_gets_an_exception_when_it_makes_an_engine(
    overlaid: Engine, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import vllm; print('imported'); vllm.EngineArgs(model='none')")
    run = overlaid.start(program, environment={"VLLM_READINESS": "-penaltis"})
    assert run.wait() == 1
    assert "imported" in run.text()
    assert "SwitchError: VLLM_READINESS='-penaltis'" in run.text().splitlines()[-1]


def start(
    arguments: list[str], variable: str, overlaid: Engine, folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run Python on the overlaid vLLM, with one variable set."""
    name, _, value = variable.partition("=")
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(overlaid.site), name: value},
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
