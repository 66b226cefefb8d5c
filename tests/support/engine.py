"""Runs of a real engine over an installation, each a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from support import sites

PROGRAM = sites.REPO / "tests" / "engine" / "generate.py"
PATIENCE = 400.0


class Engine:
    """Runs of the engine over one installation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.site = sites.whole(folder / "site")
        self.runs = 0

    def start(self, **environment: str) -> "Run":
        """Start a run; the environment variables are for it alone."""
        self.runs += 1
        return Run(self, self.folder / f"run-{self.runs}", environment)


class Run:
    """One run: its process, its log and what it wrote."""

    def __init__(self, engine: Engine, path: Path, environment: dict[str, str]) -> None:
        self.out = path.with_suffix(".json")
        self.log = path.with_suffix(".log")
        paths = [str(engine.site), str(sites.REPO / "scripts"), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # In one process every request is there before the first step, so that two runs
            # schedule alike; of weights that nearly tie, another batch gives other tokens.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            **environment,
        }
        command = [sys.executable, str(PROGRAM), str(engine.folder / "model"), str(self.out)]
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
