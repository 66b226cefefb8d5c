"""Runs of a real engine over an installation, each a process of its own."""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support import forked, sites
from support.asynchronous import announce

PROGRAM = sites.REPO / "tests" / "engine" / "generate.py"
PATIENCE = 400.0


def at_once() -> int:
    """How many engines a test may run at a time: one a core of this worker's share."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(2, (os.cpu_count() or 1) // workers))


class Engine:
    """Runs of the engine over one installation.

    Args:
        folder: a directory for it, which need not exist.
        forking: see :mod:`support.forked`; otherwise workers start as they do by default.
    """

    def __init__(self, folder: Path, forking: bool = False) -> None:
        self.folder = folder
        self.site = sites.whole(folder / "site")
        self.paths: list[Path] = []
        self.environment: Mapping[str, str] = {}
        if forking:
            self.paths = [announce(folder / "forked", forked.fork), sites.REPO / "tests"]
            self.environment = forked.ENVIRONMENT
        self.runs = itertools.count(1)

    def start(
        self,
        program: Path = PROGRAM,
        arguments: Sequence[str] = (),
        paths: Sequence[Path] = (),
        **environment: str,
    ) -> "Run":
        """Start a run; what is given here is for it alone.

        Args:
            program: takes the model's directory, the file to write, and ``arguments``.
            arguments: more of them.
            paths: where its Python looks besides.
            environment: variables to set.
        """
        path = self.folder / f"run-{next(self.runs)}"
        return Run(self, path, program, arguments, paths, environment)


class Run:
    """One run: its process, its log and what it wrote."""

    def __init__(
        self,
        engine: Engine,
        path: Path,
        program: Path,
        arguments: Sequence[str],
        paths: Sequence[Path],
        environment: dict[str, str],
    ) -> None:
        self.out = path.with_suffix(".json")
        self.log = path.with_suffix(".log")
        searched = [engine.site, sites.REPO / "scripts", *paths, *engine.paths]
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, searched), *inherited]),
            # In one process every request is there before the first step, so that two runs
            # schedule alike; of weights that nearly tie, another batch gives other tokens.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            # A view has no bytecode: let the first run write it for those that follow.
            "PYTHONDONTWRITEBYTECODE": "",
            **engine.environment,
            **environment,
        }
        files = [program, engine.folder / "model", self.out]
        command = [sys.executable, *map(str, files), *arguments]
        with self.log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str) -> None:
        """Wait until the log says ``text``."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.text():
            assert self.process.poll() is None, self.text()[-4000:]
            assert time.monotonic() < deadline, self.text()[-4000:]
            time.sleep(0.2)

    def finish(self) -> Any:
        """Wait for the end; what came out."""
        code = self.process.wait(PATIENCE)
        assert code == 0, self.text()[-4000:]
        return json.loads(self.out.read_text())
