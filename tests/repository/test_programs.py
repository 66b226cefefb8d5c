"""Properties of every program here: how it is started, and what can happen to its output."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from bench.run import save
from support import interrupts, runs
from support.probe_page import PAGE
from support.sites import REPO, run_package

SCRIPTS = REPO / "scripts"
#: Characters that an encoding may lack, and an escape sequence that a terminal would act upon.
HOSTILE = "größer …\x1b[2J"


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, Sequence[object]]:
    """A command of each program that prints much."""
    record = tmp_path / HOSTILE
    record.write_text(PAGE.replace("rank0", f"rank0 {HOSTILE}"))
    run = tmp_path / "run.json"
    save(run, runs.run(*runs.pairs(2.0), command=HOSTILE))
    return {
        "probe": ("probe", record),
        "report": ("bench.report", run),
    }


def shell(command: Sequence[object], more: str, **env: str) -> "subprocess.CompletedProcess[bytes]":
    """A package's program with shell redirections after it."""
    line = shlex.join(map(str, (sys.executable, "-m", *command)))
    return subprocess.run(
        ["/bin/bash", "-c", f"{line} {more}"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS), "PYTHONSAFEPATH": "1", **env},
    )


@pytest.mark.parametrize("name", ["probe", "report"])
def test_no_encoding_and_no_lost_output_fails_a_program(
    commands: dict[str, Sequence[object]], name: str
) -> None:
    command = commands[name]
    whole = shell(command, "", PYTHONIOENCODING="ascii")
    assert (whole.returncode, whole.stderr) == (0, b"")
    assert whole.stdout
    if name != "report":  # whose Markdown is text as it was measured
        assert whole.stdout.decode().replace("\n", "").isprintable()
    for where in (">/dev/full", ">&-") if name == "probe" else (">/dev/full",):
        done = shell(command, where)
        # The table is all that the probe's program is for.
        assert done.returncode == (1 if name == "probe" else 0), done.stderr
        assert b"the output could not be written" in done.stderr
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", ["environment", "series", "probe", "review", "bench.serving"])
def test_ctrl_c_while_a_program_starts_is_no_traceback(tmp_path: Path, name: str) -> None:
    for number in (20, 200):
        env = interrupts.environment(tmp_path, number)
        env["PYTHONPATH"] += f":{SCRIPTS}"
        command = [sys.executable, "-m", name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        line = f"{name.partition('.')[0]}: interrupted\n"
        assert (done.returncode, done.stderr) in ((-signal.SIGINT, ""), (130, line), (0, ""))
        assert done.returncode != 0 or number > 20, "nothing was interrupted"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory of modules that fail when they are imported."""
    for name in ("overlay/__init__", "probe/__init__", "series/__init__", "types", "json"):
        file = tmp_path / "hostile" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit('imported from the working directory')\n")
    return tmp_path / "hostile"


@pytest.mark.parametrize("flags", [[], ["-I"], ["-S"]])
@pytest.mark.parametrize("name", ["overlay", "probe"])
def test_a_program_is_started_by_its_directory_from_anywhere(
    hostile: Path, name: str, flags: list[str]
) -> None:
    """As in Dockerfiles."""
    command = [sys.executable, *flags, str(SCRIPTS / name), "--help"]
    done = subprocess.run(command, cwd=hostile, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name} ")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
@pytest.mark.parametrize("name", ["overlay", "series", "environment", "probe"])
def test_a_package_is_run_from_anywhere(hostile: Path, name: str) -> None:
    done = run_package(name, "--help", cwd=hostile)
    assert (done.returncode, done.stderr) == (0, "")
