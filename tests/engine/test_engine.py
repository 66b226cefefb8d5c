"""A real engine on the CPU, started as a user starts it: before apply, after it, after revert.

All engines use the same copy of vLLM. Each starts in a new process, which imports vLLM, and the
overlaid one's worker imports it again. No engine compiles, as compiled code may give other bits.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from support import forked
from support.asynchronous import announce
from support.engine import PATIENCE, Engine
from support.sites import OVERLAY, REPO, run
from vllm.v1.readiness import registry

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """The installation that is overlaid and reverted."""
    return Engine(folder / "engine")


@pytest.fixture(scope="module")
def forking(folder: Path) -> Path:
    """A directory that makes an engine fork its worker."""
    return announce(folder / "forked", forked.fork)


@pytest.fixture(scope="module")
def pristine(forking: Path, engine: Engine) -> Any:
    """Stock vLLM's outputs."""
    stock = engine.start(paths=[forking], environment=forked.ENVIRONMENT)
    outputs = stock.finish()
    assert "Readiness overlay" not in stock.text()
    return outputs


def test_requests_are_answered_and_differ(pristine: Any) -> None:
    """Otherwise identical outputs would say little."""
    assert len({json.dumps(output["tokens"]) for output in pristine}) > len(pristine) // 2
    assert sum(output["logprobs"] is not None for output in pristine) >= 6
    assert all(output["tokens"] for output in pristine)


def test_overlaid_engine_equals_stock_and_logs_its_digest(engine: Engine, pristine: Any) -> None:
    engine.apply()
    assert run("verify", "--site", engine.site).returncode == Exit.DONE
    overlaid = engine.start(environment={**forked.ENVIRONMENT, "VLLM_READINESS": "-fixes"})
    overlaid.wait_for("Readiness overlay")
    in_use = run("revert", "--site", engine.site)
    assert in_use.returncode == Exit.BUSY
    assert "process" in in_use.stderr
    assert overlaid.finish() == pristine
    digest = json.loads(run("status", "--site", engine.site, "--json").stdout)["digest"]
    begin = f"Readiness overlay {OVERLAY.pin.overlay}, digest {digest}, features: "
    (line,) = [line for line in overlaid.text().splitlines() if begin in line]
    assert line.endswith("fixes: none; runner: V1 on CPU")
    assert "Unknown vLLM environment variable" not in overlaid.text()


def test_reverted_engine_is_stock_again(engine: Engine, pristine: Any, forking: Path) -> None:
    engine.apply()
    engine.revert()
    reverted = engine.start(paths=[forking], environment=forked.ENVIRONMENT)
    assert reverted.finish() == pristine
    assert "Readiness overlay" not in reverted.text()


def test_a_part_equals_stock_and_logs_what_is_not_installed(
    engine: Engine, pristine: Any, forking: Path
) -> None:
    engine.apply("--leave=vllm/v1/sample/sampler.py")
    environment = {**forked.ENVIRONMENT, "VLLM_READINESS": "-fixes"}
    part = engine.start(paths=[forking], environment=environment)
    assert part.finish() == pristine
    report = json.loads(run("status", "--site", engine.site, "--json").stdout)
    assert registry.PENALTIES in report["left_out"]
    names = ", ".join(report["left_out"])
    gpu = {name for name, word in registry.WORDS.items() if word.device == "gpu"}
    on = ", ".join(sorted(registry.FEATURES.keys() - report["left_out"] - gpu))
    text = part.text()
    assert f"digest {report['digest']}, features: {on}; fixes: none; " in text
    assert f"Readiness overlay: left out by `apply`: {names}" in text


def test_demo_serves_over_http_from_an_overlaid_engine(engine: Engine) -> None:
    env = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    command = ["make", f"PYTHON3={sys.executable}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        [*command, "demo", f"SITE={engine.site}", "FORCE=1"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
        env={**env, **forked.ENVIRONMENT},
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
