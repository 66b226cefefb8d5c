"""Runs of a real engine over an installation, each a process of its own."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from overlay.errors import Exit

from support import forked, launcher, sites
from support.asynchronous import announce
from support.launcher import Job

PROGRAM = sites.REPO / "tests" / "engine" / "generate.py"
#: Where programs find their modules.
_PROGRAMS = (sites.REPO / "scripts", sites.REPO / "tests")
#: Seconds to wait for a run.
PATIENCE = 1000.0
_NO_CHANGES: Mapping[str, str] = MappingProxyType({})


def at_once() -> int:
    """Return how many engines a test may run at a time: one a core of this worker's share."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, min(2, (os.cpu_count() or 1) // workers))


class Engine:
    """Runs of the engine over one view of the installation.

    Attributes:
        folder: holds the view (``site``), the model (``model``), and each run's log and output.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = sites.whole(folder / "site", bytecode=True)
        self._numbers = itertools.count(1)

    def apply(self, *options: str) -> None:
        """Lay the overlay over the view, whoever serves from the same interpreter."""
        self._overlay("apply", *options)

    def revert(self) -> None:
        """Take the overlay off again."""
        self._overlay("revert")

    def _overlay(self, command: str, *options: str) -> None:
        named = ("--site", self.site, "--python", sys.executable)
        done = sites.run(command, "--force", *named, *options)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr

    def start(
        self,
        program: Path = PROGRAM,
        arguments: Sequence[str] = (),
        paths: Sequence[Path] = (),
        environment: Mapping[str, str] = _NO_CHANGES,
    ) -> "Run":
        """Start a run.

        Args:
            program: a program that takes the model's directory, the file to write, and
                ``arguments``.
            arguments: its further arguments.
            paths: further directories of its PYTHONPATH.
            environment: variables to set for it.
        """
        run = Run(self.folder / f"run-{next(self._numbers)}")
        files = [str(self.folder / "model"), str(run.out)]
        searched = [*map(str, paths)]
        log, code = str(run.log), str(run.out.with_suffix(".code"))
        job = Job(str(program), [*files, *arguments], searched, dict(environment), log, code)
        run.process = self.launch(job)
        return run

    def launch(self, job: Job) -> "subprocess.Popen[bytes] | Forked":
        """Start a job's process, which leads a process group."""
        searched = [self.site, *_PROGRAMS, *map(Path, job.paths)]
        with Path(job.log).open("wb") as sink:
            return subprocess.Popen(
                [sys.executable, job.program, *job.arguments],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**_environment(searched), **job.environment},
                start_new_session=True,
            )


class Forked:
    """A process that a launcher has forked, as far as :class:`subprocess.Popen` is needed.

    Args:
        launcher: the process that forks it.
        code: the file where its exit code is written.
    """

    def __init__(self, launcher: "subprocess.Popen[bytes]", code: Path) -> None:
        self._launcher, self._code = launcher, code

    @property
    def pid(self) -> int:
        """Process id, once it has begun."""
        return int(Path(f"{self._code}.pid").read_text())

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return int(self._code.read_text()) if self._code.exists() else self._launcher.poll()

    def wait(self, timeout: float = PATIENCE) -> int:
        """Wait for the end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self._code), timeout)
            time.sleep(0.05)
        return code


class PreloadedEngine(Engine):
    """An engine whose runs, and their workers, are forked from one process with vLLM imported.

    The installation stays as it is, pristine or overlaid, from the first run on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def launch(self, job: Job) -> "Forked":
        """Let the launcher fork a job's process."""
        with self._lock:
            self._process = self._process or self._preload()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job._asdict()).encode() + b"\n")
            self._process.stdin.flush()
            return Forked(self._process, Path(job.exit_code))

    def _preload(self) -> "subprocess.Popen[bytes]":
        workers = announce(self.folder / "forked", forked.fork)
        searched = [self.site, *_PROGRAMS, workers]
        with (self.folder / "launcher.log").open("wb") as sink:
            return subprocess.Popen(
                [sys.executable, "-m", launcher.__name__],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**_environment(searched), **forked.ENVIRONMENT},
            )

    def close(self) -> None:
        """End the launcher, once its runs have ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _environment(searched: Sequence[Path]) -> dict[str, str]:
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, searched), *inherited]),
        # In one process every request is there before the first step, so that two runs
        # schedule alike; of weights that nearly tie, another batch gives other tokens.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # Let the first run write the bytecode that a view lacks, for those that follow.
        "PYTHONDONTWRITEBYTECODE": "",
    }


class Run:
    """One run of a program.

    Attributes:
        out: the JSON file that it writes.
        log: what it prints.
        process: its process.
    """

    process: "subprocess.Popen[bytes] | Forked"

    def __init__(self, path: Path) -> None:
        self.out = path.with_suffix(".json")
        self.log = path.with_suffix(".log")

    def text(self) -> str:
        """Return the log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self.process.poll()

    def wait_for(self, text: str) -> None:
        """Wait until the log holds ``text``."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.text():
            assert self.poll() is None, self.text()[-4000:]
            assert time.monotonic() < deadline, self.text()[-4000:]
            time.sleep(0.2)

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        deadline = time.monotonic() + PATIENCE
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline, self.text()[-4000:]
            time.sleep(0.05)
        return code

    def finish(self) -> Any:
        """Wait for the end, and return what the program wrote."""
        assert self.wait() == 0, self.text()[-4000:]
        return json.loads(self.out.read_text())
