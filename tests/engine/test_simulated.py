"""Whatever the device's timing, a request gives what stock vLLM.

One real engine, scheduled asynchronously on a simulated device, and drawn sets of requests
and timings; and again with faults planted, to show that they would be found.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine.simulated import FEW
from overlay.errors import Exit
from support import asynchronous
from support.checkpoint import generate
from support.engine import Engine, at_once
from support.mutants import MUTANTS
from support.sites import REPO, run

PROGRAM = REPO / "tests" / "engine" / "simulated.py"
#: No faults here are those of a runner that let go of what it sampled before it read it, or
#: that dropped a readback unread: this one does neither.
FAULTS = sorted({*MUTANTS} - {"sources let go of", "reused in flight"})


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Any]]:
    """What came out as things are, and with faults planted."""
    folder = Path(tempfile.mkdtemp(prefix="simulated-", dir=REPO / "build"))
    engine = Engine(folder, forking=True)
    generate(folder / "model")
    plugin = asynchronous.announce(folder / "plugin", asynchronous.register)
    stock = engine.start(PROGRAM, ["reference"], [REPO / "tests"])
    reference = stock.finish()
    assert (
        run("apply", "--force", "--site", engine.site, "--python", sys.executable).returncode
        == Exit.DONE
    )

    def result(mode: str, *plants: str) -> Any:
        arguments = [mode, str(stock.out), *plants]
        return engine.start(PROGRAM, arguments, [REPO / "tests", plugin]).finish()

    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        plain, planted = pool.submit(result, "check"), pool.submit(result, "plants", *FAULTS)
        yield {"reference": reference, "plain": plain.result(), "planted": planted.result()}
    shutil.rmtree(folder)


def test_every_request_gives_what_it_gives_in_stock(runs: dict[str, Any]) -> None:
    assert runs["plain"]["wrong"] is None, json.dumps(runs["plain"]["wrong"])
    assert runs["plain"]["examples"] >= 100


def test_nobody_waited_for_a_whole_stream(runs: dict[str, Any]) -> None:
    evidence = runs["plain"]["evidence"]
    assert evidence["stream_waits"] == 0
    assert evidence["strays"] == 0


def test_the_engine_read_back_late_in_many_situations(runs: dict[str, Any]) -> None:
    evidence = runs["plain"]["evidence"]
    assert evidence["scheduler"] == "AsyncScheduler"
    assert evidence["outputs handed over unready"] > 500
    assert evidence["copies"] > 1000
    assert evidence["prefill chunks"] > 50
    assert evidence["preempted"] > 5
    # Buffers are used again and again.
    assert evidence["allocations"] < 100


def test_the_references_are_diverse(runs: dict[str, Any]) -> None:
    """Otherwise identical outputs would say little."""
    reference = runs["reference"]
    assert len({json.dumps(result["tokens"]) for result in reference}) > 0.9 * len(reference)
    assert sum(result["logprobs"] is not None for result in reference) > 20
    assert sum(result["prompt_logprobs"] is not None for result in reference) > 15


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_shown_by_few_requests(
    runs: dict[str, Any], name: str
) -> None:
    wrong = runs["planted"][name]["wrong"]
    assert wrong is not None
    assert len(wrong["visits"]) <= FEW
