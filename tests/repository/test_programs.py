"""What holds for every program here: its output cannot fail it, and Ctrl-C is no traceback."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support import interrupts, probes, runs
from support.sites import REPO, UPSTREAM

SCRIPTS = REPO / "scripts"
#: What an encoding may lack, and a terminal would act upon.
HOSTILE = "größer …\x1b[2J"


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, tuple[Sequence[object], int]]:
    """A command of each program that prints much, and what it ends with."""
    record = tmp_path / HOSTILE
    probes.written(tmp_path / f"{record.name}.rank0", [], label=f"rank0 {HOSTILE}")
    run = tmp_path / "run.json"
    run.write_text(json.dumps(runs.engine() | {"command": HOSTILE}))
    return {
        "probe": ((SCRIPTS / "probe", record), 0),
        "probe --trace": ((SCRIPTS / "probe", record, "--trace", tmp_path / "trace…"), 0),
        "report": (("-m", "bench.report", run), 0),
        "review": (
            (SCRIPTS / "review", "diff", "--site", UPSTREAM, "--out", tmp_path / HOSTILE),
            0,
        ),
    }


def shell(command: Sequence[object], more: str, **env: str) -> "subprocess.CompletedProcess[bytes]":
    line = shlex.join(map(str, (sys.executable, *command)))
    env["PYTHONPATH"] = shlex.quote(str(SCRIPTS))
    settings = " ".join(f"{name}={value}" for name, value in env.items())
    return subprocess.run(
        ["/bin/bash", "-c", f"{settings} {line} {more}"], capture_output=True, check=False
    )


@pytest.mark.parametrize("name", ["probe", "probe --trace", "report", "review"])
def test_no_encoding_and_no_lost_output_fails_a_program(
    commands: dict[str, tuple[Sequence[object], int]], name: str
) -> None:
    command, code = commands[name]
    whole = shell(command, "", PYTHONIOENCODING="ascii")
    assert (whole.returncode, whole.stderr) == (code, b"")
    assert whole.stdout
    if name != "report":  # whose Markdown is text as it was measured
        assert whole.stdout.decode().replace("\n", "").isprintable()
    for where in (">/dev/full", ">&-"):
        done = shell(command, where)
        # The table is all that the probe's program is for.
        assert done.returncode == (1 if name == "probe" else code), done.stderr
        assert b"the output could not be written" in done.stderr
        assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    "name", ["environment", "probe", "review", "bench.engine", "bench.serving"]
)
def test_ctrl_c_while_a_program_starts_is_no_traceback(tmp_path: Path, name: str) -> None:
    for at in (2, 5, 20, 60, 200):
        env = interrupts.environment(tmp_path, at)
        env["PYTHONPATH"] += f"{os.pathsep}{SCRIPTS}"
        program = ["-m", name] if "." in name else [str(SCRIPTS / name)]
        command = [sys.executable, *program, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        line = f"{name.partition('.')[0]}: interrupted\n"
        assert (done.returncode, done.stderr) in ((-signal.SIGINT, ""), (130, line), (0, ""))
        assert done.returncode != 0 or at > 20, "nothing was interrupted"
