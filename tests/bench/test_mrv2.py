"""The benchmark of MRV2's sampler: its report. What it measures needs a GPU."""

import argparse
import copy
import subprocess
import sys
from typing import Any

import pytest
from bench import mrv2
from support.sites import REPO

ARGS = argparse.Namespace(batch=128, vocab=1000, calls=5)


def a_side(ms: float) -> dict[str, Any]:
    found: dict[str, Any] = {"device": "none"}
    for case in mrv2.CASES:
        found[case] = {"device ms": ms, "host ms": ms / 2, "queued": True, "digest": case}
    return found


@pytest.fixture
def rounds() -> list[dict[str, Any]]:
    """Three rounds; the overlaid side takes half as long."""
    return [{"stock": a_side(ms), "overlaid": a_side(ms / 2)} for ms in (1.0, 1.2, 1.4)]


def row(text: str, case: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {case} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_medians_and_their_ratio(rounds: list[dict[str, Any]]) -> None:
    text = mrv2.table(ARGS, rounds, "0" * 64)
    assert row(text, "greedy")[1:] == ["1.2000", "0.6000", "0.500", "0.6000", "0.3000"]


@pytest.mark.parametrize(
    ("key", "value", "said"), [("digest", "other", "differ"), ("queued", False, "waited")]
)
def test_what_spoils_a_ratio(
    rounds: list[dict[str, Any]], key: str, value: object, said: str
) -> None:
    for side in ("stock", "overlaid"):
        spoilt = copy.deepcopy(rounds)
        spoilt[1][side]["top_p 0.9"][key] = value
        text = mrv2.table(ARGS, spoilt, "0" * 64)
        assert said in row(text, "top_p 0.9")[3]
        assert row(text, "greedy")[3] == "0.500"


def test_an_installation_that_is_not_there_is_named() -> None:
    command = [sys.executable, str(REPO / "scripts" / "bench" / "mrv2.py"), "--site", "/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
