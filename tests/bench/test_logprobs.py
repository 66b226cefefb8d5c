"""The benchmark of what logprobs cost the host."""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench import logprobs
from bench.logprob_work import PARTS, SIDES, TOGETHER, Case, Pauses, figures
from support.benches import bench


@pytest.mark.slow
def test_every_side_is_measured_and_gives_clients_the_same(tmp_path: Path) -> None:
    sizes = ["--batch", "4", "--steps", "12", "--output", "6", "--logprobs", "3"]
    done = bench("logprobs", tmp_path, "--rounds", "1", *sizes)
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["complete"]
    assert run["problems"] == []
    (measured,) = run["rounds"]
    assert len(measured["cases"]) == 4
    for case in measured["cases"].values():
        assert list(case) == list(SIDES)
        for side in case.values():
            assert list(side["parts"]) == [*PARTS, TOGETHER]
            assert all(0 < part["p50"] <= part["p99"] for part in side["parts"].values())


def measured(on: float, digest: str = "same", processor: str = "DeferredLogprobs") -> Any:
    """One round of one case."""

    def side(time: float, kind: str, said: str = "same") -> Any:
        parts = {part: {"p50": time, "p99": 2 * time, "mean": time} for part in (*PARTS, TOGETHER)}
        pauses = {"count": 0, "longest": 0.0, "a step": time}
        return {"processor": kind, "digest": said, "parts": parts, "pauses": pauses}

    off = side(4.0, "LogprobsProcessor")
    return {"cases": {"case": {"off": off, "off again": off, "on": side(on, processor, digest)}}}


@pytest.mark.parametrize(
    ("times", "mark"),
    [((1.0, 2.0, 3.0), "?"), ((1.0, 2.0, 2.0, 2.0, 8.0), "~"), ((1.9, 2.0, 2.0, 2.0, 2.1), "")],
)
def test_a_row_is_of_the_medians(times: Sequence[float], mark: str) -> None:
    rows = logprobs.rows([measured(on) for on in times])
    *medians, on, again = next(row for row in rows if row[1] == f"{TOGETHER}, p50")
    assert medians == ["case", "together, p50", 4.0, 4.0, 2.0]
    assert on == ([0.5, mark] if mark else 0.5)
    assert again == [1.0, mark or "~"]
    pause = next(row for row in rows if row[1] == "longest pause")
    assert pause[2:] == [0, 0, 0, "-", "-"]
    assert logprobs.rows([]) == []


def test_other_outputs_and_a_switch_that_is_not_obeyed_are_problems() -> None:
    rounds = [measured(1), measured(1, digest="other"), measured(1, processor="LogprobsProcessor")]
    assert logprobs.problems(rounds) == [
        "round 2, case: clients were given different logprobs",
        "round 3, case: the switch was not obeyed",
    ]


def test_pauses_are_counted_by_generation() -> None:
    pauses = Pauses()
    with pauses.counted():
        gc.collect(0)
        gc.collect(2)
    gc.collect(2)
    assert len(pauses.oldest) == 1
    assert 0 < pauses.oldest[0] <= pauses.all


def test_figures_are_milliseconds() -> None:
    found = figures([1_000_000] * 99 + [9_000_000])
    assert (found["p50"], found["mean"]) == (1.0, 1.08)
    assert Case(5, True, False).name == "5 logprobs, streaming, token ids"
