"""A real engine on the CPU: before apply, after it, and after revert.

One installation throughout: a view of the shared environment's vLLM, each file a hard
link to it. An engine takes about a minute to start on two cores, so each run carries
every setting.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from support import sites
from support.sites import OVERLAY, REPO, run

PROGRAM = Path(__file__).with_name("generate.py")
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
        paths = [str(engine.site), str(REPO / "scripts")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
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


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The installation, beside the shared environment so that it can be linked to it."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=REPO / "build"))
    yield Engine(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def pristine(engine: Engine) -> Any:
    """What stock vLLM generates."""
    run_ = engine.start()
    results = run_.finish()
    assert "Readiness overlay" not in run_.text()
    return results


def test_the_requests_differ_and_are_answered(pristine: Any) -> None:
    """Otherwise identical outputs would say little."""
    assert len({json.dumps(result["tokens"]) for result in pristine}) > len(pristine) // 2
    assert sum(result["logprobs"] is not None for result in pristine) >= 6
    assert all(result["tokens"] for result in pristine)


def test_the_overlaid_engine_gives_the_same_and_says_who_it_is(
    engine: Engine, pristine: Any
) -> None:
    assert run("apply", "--site", engine.site, "--python", sys.executable).returncode == Exit.DONE
    assert run("verify", "--site", engine.site).returncode == Exit.DONE
    overlaid = engine.start(VLLM_READINESS="on")
    overlaid.wait_for("Readiness overlay")
    in_use = run("revert", "--site", engine.site)
    assert in_use.returncode == Exit.BUSY
    assert "process" in in_use.stderr
    assert overlaid.finish() == pristine
    digest = json.loads(run("status", "--site", engine.site, "--json").stdout)["digest"]
    said = [line for line in overlaid.text().splitlines() if "Readiness overlay" in line]
    assert len(said) == 1
    assert f"overlay {OVERLAY.pin.overlay}, digest {digest}, features on: " in said[0]
    assert "Unknown vLLM environment variable" not in overlaid.text()


def test_a_misspelt_switch_is_refused_at_start_up(engine: Engine) -> None:
    run("apply", "--site", engine.site, "--python", sys.executable)
    refused = engine.start(VLLM_READINESS="banana")
    assert refused.process.wait(PATIENCE) != 0
    assert "VLLM_READINESS='banana'" in refused.text()
    assert "Valid: on, off" in refused.text()
    assert not refused.out.exists()


def test_after_revert_the_engine_is_stock_again(engine: Engine, pristine: Any) -> None:
    run("apply", "--site", engine.site, "--python", sys.executable)
    assert run("revert", "--site", engine.site, "--python", sys.executable).returncode == Exit.DONE
    reverted = engine.start()
    assert reverted.finish() == pristine
    assert "Readiness overlay" not in reverted.text()


def test_the_demo_serves_over_http_from_an_overlaid_engine(engine: Engine) -> None:
    named = ("VENV", "SITE", "PYTHON", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    env = {key: value for key, value in os.environ.items() if key not in named}
    command = ["make", f"PYTHON3={sys.executable}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        [*command, "demo", f"SITE={engine.site}"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert f"Readiness overlay {OVERLAY.pin.overlay}" in done.stdout
    answers = [line for line in done.stdout.splitlines() if " -> [" in line]
    assert len(answers) == 2
    for answer in answers:
        tokens = json.loads(answer.partition(" -> ")[2])
        assert len(tokens) == 12
        assert all(0 <= token < 1024 for token in tokens)
