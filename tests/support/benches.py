"""The benchmarks' programs, run as a user runs them."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.sites import REPO, UPSTREAM


def bench(
    name: str,
    out: Path,
    *arguments: str,
    site: Path = UPSTREAM,
    paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> "subprocess.CompletedProcess[str]":
    """Run a benchmark to its end.

    Args:
        name: of its module in bench.
        out: gets its results.
        arguments: further ones.
        site: the installation to measure.
        paths: further entries of PYTHONPATH, before the others.
        environment: further variables.
    """
    searched = os.pathsep.join(map(str, [*paths, REPO / "scripts"]))
    command = [sys.executable, "-m", f"bench.{name}", "--site", str(site)]
    return subprocess.run(
        [*command, "--python", sys.executable, *arguments, "--out", str(out)],
        env={**os.environ, **(environment or {}), "PYTHONPATH": searched},
        capture_output=True,
        text=True,
        check=False,
    )
