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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit
from support.engine import PATIENCE, Engine
from support.sites import OVERLAY, REPO, run


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The installation, beside the shared environment so that it can be linked to it."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=REPO / "build"))
    yield Engine(folder)
    shutil.rmtree(folder)


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
    assert (
        run("apply", "--force", "--site", engine.site, "--python", sys.executable).returncode
        == Exit.DONE
    )
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


FACTORS = """
import json, vllm.envs
vllm.envs.validate_environ(hard_fail=True)
print("\\n" + json.dumps(vllm.envs.compile_factors(), default=str, sort_keys=True))
"""


def test_compiled_code_stays_valid_and_the_switch_is_known(engine: Engine) -> None:
    """VLLM keys its caches of compiled code by its variables, but not by ours."""
    run("apply", "--force", "--site", engine.site, "--python", sys.executable)
    factors = []
    plain = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    overlaid = {"PYTHONPATH": str(engine.site)}
    for extra in ({}, overlaid, overlaid | {"VLLM_READINESS": "off"}):
        command = [sys.executable, "-c", FACTORS]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=plain | extra
        )
        assert done.returncode == 0, done.stderr
        factors.append(json.loads(done.stdout.splitlines()[-1]))
    assert len(factors[0]) > 50
    assert factors[0] == factors[1] == factors[2]


def test_a_misspelt_switch_is_refused_at_start_up(engine: Engine) -> None:
    run("apply", "--force", "--site", engine.site, "--python", sys.executable)
    refused = engine.start(VLLM_READINESS="banana")
    assert refused.process.wait(PATIENCE) != 0
    assert "VLLM_READINESS='banana'" in refused.text()
    assert "Valid: on, off" in refused.text()
    assert not refused.out.exists()


def test_after_revert_the_engine_is_stock_again(engine: Engine, pristine: Any) -> None:
    run("apply", "--force", "--site", engine.site, "--python", sys.executable)
    assert (
        run("revert", "--force", "--site", engine.site, "--python", sys.executable).returncode
        == Exit.DONE
    )
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
