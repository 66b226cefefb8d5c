"""A real engine on the CPU: before apply, after it, and after revert.

One view of the shared environment's vLLM throughout, and processes that start as a user's do:
each imports vLLM anew. An engine takes up to a minute to start on two cores, so each run
carries every setting.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from support.engine import PATIENCE, Engine, PreloadedEngine
from support.sites import OVERLAY, REPO, run

FACTORS = REPO / "tests" / "engine" / "factors.py"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    """The installation that is overlaid and reverted."""
    return Engine(folder / "engine")


@pytest.fixture(scope="module")
def pristine(engine: Engine) -> Any:
    """What stock vLLM generates."""
    stock = engine.start()
    results = stock.finish()
    assert "Readiness overlay" not in stock.text()
    return results


def test_the_requests_differ_and_are_answered(pristine: Any) -> None:
    """Otherwise identical outputs would say little."""
    assert len({json.dumps(result["tokens"]) for result in pristine}) > len(pristine) // 2
    assert sum(result["logprobs"] is not None for result in pristine) >= 6
    assert all(result["tokens"] for result in pristine)


def test_the_overlaid_engine_gives_the_same_and_says_who_it_is(
    engine: Engine, pristine: Any
) -> None:
    engine.apply()
    assert run("verify", "--site", engine.site).returncode == Exit.DONE
    overlaid = engine.start(VLLM_READINESS="on")
    overlaid.wait_for("Readiness overlay")
    in_use = run("revert", "--site", engine.site)
    assert in_use.returncode == Exit.BUSY
    assert "process" in in_use.stderr
    assert overlaid.finish() == pristine
    digest = json.loads(run("status", "--site", engine.site, "--json").stdout)["digest"]
    lines = [line for line in overlaid.text().splitlines() if "Readiness overlay" in line]
    assert len(lines) == 1
    assert f"overlay {OVERLAY.pin.overlay}, digest {digest}, features: " in lines[0]
    assert "Unknown vLLM environment variable" not in overlaid.text()


def test_after_revert_the_engine_is_stock_again(engine: Engine, pristine: Any) -> None:
    engine.apply()
    engine.revert()
    reverted = engine.start()
    assert reverted.finish() == pristine
    assert "Readiness overlay" not in reverted.text()


def test_the_demo_serves_over_http_from_an_overlaid_engine(engine: Engine) -> None:
    named = ("VENV", "SITE", "PYTHON", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    env = {key: value for key, value in os.environ.items() if key not in named}
    command = ["make", f"PYTHON3={sys.executable}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        [*command, "demo", f"SITE={engine.site}", "FORCE=1"],
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


def test_compiled_code_stays_valid_and_the_switch_is_known(
    stock: PreloadedEngine, overlaid: PreloadedEngine
) -> None:
    """VLLM keys its caches of compiled code by its variables, but not by ours."""
    keys = [
        stock.start(FACTORS).finish(),
        overlaid.start(FACTORS).finish(),
        overlaid.start(FACTORS, VLLM_READINESS="off").finish(),
    ]
    assert len(keys[0]) > 50
    assert keys[0] == keys[1] == keys[2]


def test_a_misspelt_switch_is_refused_at_start_up(overlaid: PreloadedEngine) -> None:
    refused = overlaid.start(VLLM_READINESS="banana")
    assert refused.wait() != 0
    assert "VLLM_READINESS='banana'" in refused.text()
    assert "Valid: on, off" in refused.text()
    assert not refused.out.exists()
