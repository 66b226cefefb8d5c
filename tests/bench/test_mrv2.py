"""The benchmark of MRV2's sampler: its report. What it measures needs a GPU."""

import argparse
import copy
import subprocess
import sys
import time
from typing import Any

import pytest
from bench import mrv2, report
from support.sites import REPO

ARGS = argparse.Namespace(batch=128, vocab=1000, calls=5, site=None)


def a_side(ms: float) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "none"}
    for case in mrv2.CASES:
        found[case] = {"device ms": ms, "host ms": ms / 2, "queued": True, "digest": case}
    return found


@pytest.fixture
def rounds() -> list[dict[str, Any]]:
    """Three rounds; the overlaid side takes half as long."""
    return [{"stock": a_side(ms), "overlaid": a_side(ms / 2)} for ms in (1.0, 1.2, 1.4)]


def test_medians_and_their_ratio(rounds: list[dict[str, Any]]) -> None:
    rows, problems = mrv2.table(rounds)
    assert rows[0] == ["greedy", 1.2, 0.6, 0.5, 0.6, 0.3]
    assert problems == []
    run = mrv2._run(ARGS, rounds, time.monotonic(), {"stock": "0" * 64, "overlaid": "1" * 64})
    assert run["rows"] == rows
    assert "| greedy | 1.200 | 0.6000 | 0.500 | 0.6000 | 0.3000 |" in report.markdown(run)


@pytest.mark.parametrize(
    ("key", "value", "said"), [("digest", "other", "differ"), ("queued", False, "waited")]
)
def test_what_spoils_a_ratio(
    rounds: list[dict[str, Any]], key: str, value: object, said: str
) -> None:
    for side in ("stock", "overlaid"):
        spoilt = copy.deepcopy(rounds)
        spoilt[1][side]["top_p 0.9"][key] = value
        rows, (problem,) = mrv2.table(spoilt)
        assert problem.startswith("top_p 0.9: ")
        assert said in problem
        assert {row[0]: row[3] for row in rows if row[3] != 0.5} == {"top_p 0.9": "refused"}


def test_an_installation_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(REPO / "scripts" / "bench" / "mrv2.py"), "--site", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
