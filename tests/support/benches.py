"""The benchmarks' programs, run as a user runs them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.run import Run, load

from support import forked
from support.asynchronous import announce
from support.sites import REPO, UPSTREAM


def measured(
    program: str, out: Path, *arguments: str, plugins: tuple[Callable[[], None], ...] = ()
) -> Run:
    """A whole run of a benchmark, which has failed in nothing.

    Args:
        program: its module in bench.
        out: gets its results.
        arguments: further ones.
        plugins: of the measured engines.
    """
    folder = announce(out.parent / "plugins", *plugins, forked.fork)
    searched = os.pathsep.join(map(str, [folder, REPO / "tests", REPO / "scripts"]))
    command = [sys.executable, "-m", f"bench.{program}", "--site", str(UPSTREAM)]
    done = subprocess.run(
        [*command, "--python", sys.executable, *arguments, "--out", str(out)],
        env={**os.environ, **forked.ENVIRONMENT, "PYTHONPATH": searched},
        capture_output=True,
        text=True,
        check=False,
    )
    logs = "".join(f"{file}:\n{file.read_text(errors='replace')}" for file in out.glob("*.log"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:] + logs
    run = load(out / "run.json")
    assert run.complete
    assert run.problems == [], logs
    return run
