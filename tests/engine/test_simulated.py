"""A request gives stock's output, whatever the device's timing.

Hypothesis draws sets of requests and timings for one real engine, which schedules
asynchronously on a simulated device. A slow test plants faults, which must be found.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from engine.simulated import FEW
from support import asynchronous
from support.engine import PreloadedEngine, Run
from support.mutants import MUTANTS
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "simulated.py"
#: Left out are the faults of a runner that lets go of what it sampled before it is read, or
#: drops a readback unread: this one does neither.
FAULTS = sorted({*MUTANTS} - {"sources let go of", "reused in flight"})


@pytest.fixture(scope="module")
def reference(stock: PreloadedEngine) -> Run:
    """Stock's outputs."""
    run = stock.start(PROGRAM, ["reference"])
    run.finish()
    return run


def simulate(folder: Path, overlaid: PreloadedEngine, reference: Run, *arguments: str) -> Any:
    """The report of an overlaid engine on a simulated device."""
    device = asynchronous.announce(folder / "device", asynchronous.register)
    mode, *faults = arguments
    return overlaid.start(PROGRAM, [mode, str(reference.out), *faults], [device]).finish()


@pytest.fixture(scope="module")
def checked(folder: Path, overlaid: PreloadedEngine, reference: Run) -> Any:
    """The report of drawn requests and timings."""
    return simulate(folder, overlaid, reference, "check")


@pytest.fixture(scope="module")
def planted(folder: Path, overlaid: PreloadedEngine, reference: Run) -> Any:
    """By planted fault, the same report."""
    return simulate(folder, overlaid, reference, "plants", *FAULTS)


def test_every_request_gives_what_it_gives_in_stock(checked: Any) -> None:
    assert checked["wrong"] is None, json.dumps(checked["wrong"])
    assert checked["examples"] >= 100


def test_nobody_waited_for_a_whole_stream(checked: Any) -> None:
    assert checked["stats"]["stream_waits"] == 0
    assert checked["stats"]["strays"] == 0


def test_the_engine_read_back_late_in_many_situations(checked: Any) -> None:
    stats = checked["stats"]
    assert stats["scheduler"] == "AsyncScheduler"
    assert stats["outputs handed over unready"] > 500
    assert stats["copies"] > 1000
    assert stats["prefill chunks"] > 50
    assert stats["preempted"] > 5
    assert stats["allocations"] < 100, "buffers are not reused"


def test_the_references_are_diverse(reference: Run) -> None:
    """Otherwise identical outputs would say little."""
    results = reference.finish()
    assert len({json.dumps(result["tokens"]) for result in results}) > 0.9 * len(results)
    assert sum(result["logprobs"] is not None for result in results) > 20
    assert sum(result["prompt_logprobs"] is not None for result in results) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_shown_by_few_requests(
    planted: dict[str, Any], name: str
) -> None:
    wrong = planted[name]["wrong"]
    assert wrong is not None
    assert len(wrong["visits"]) <= FEW
