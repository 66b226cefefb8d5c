"""Sides that only seem fast: each is refused, or gains nothing."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.compare import clock
from bench.compare.summary import STOCK, CaseResult, Child, summarise
from bench.engines import driver
from bench.engines.interference import Interference
from bench.engines.prompts import Place, draw
from bench.engines.rows import BASELINE, ROWS, Case
from support.remembering import Remembering, driven
from support.sites import REPO

pytestmark = pytest.mark.slow
ROW = replace(
    ROWS["issue-43450"].sized("tiny"),
    cases={
        BASELINE: Case(),
        "presence": Case(({"presence_penalty": 1.5},)),
        "streamed": Case(({},)),
    },
)


def measured(engine: driver.Engine, number: int) -> dict[str, dict[str, Any]]:
    """What the driver writes of each case in a round."""
    return {
        name: driver._case(engine, ROW, Place(number, ROW.name, name), Interference(), False)
        for name in ROW.cases
    }


def child(side: str, number: int, cases: dict[str, Any]) -> Child:
    results = {
        name: CaseResult(
            {"tokens/s": 1.0},
            {kind: case[kind] for kind in ("tokens", "logprobs")},
            case["counts"],
            case["problems"],
            prompts=case["prompts"],
        )
        for name, case in cases.items()
    }
    return Child(side, number, results)


def problems(*children: Child, side: str = "overlaid", case: str = BASELINE) -> list[str]:
    row = summarise(dict.fromkeys(ROW.cases), (STOCK, "overlaid"), children)
    refused: list[str] = row["cases"][case]["problems"][side]
    ratio = row["cases"][case]["figures"]["tokens/s"]["ratios"]["overlaid"]
    assert (ratio is None) == any(row["cases"][case]["problems"].values())
    return refused


def test_a_side_that_remembers_prompts_recalls_nothing() -> None:
    """Neither from the warm-up nor from another case, row or round of the same process."""
    engine, inner = driven(ROW)
    for number in (1, 2, 3):
        measured(engine, number)
    assert inner.recalled == 0
    assert len(set(inner.prompts)) == len(inner.prompts) == 3 * 3 * 2 * ROW.engine.batch
    measured(engine, 1)
    assert inner.recalled > 0


def test_every_side_is_given_the_same_prompts() -> None:
    one, other = (measured(driven(ROW)[0], 2) for _ in range(2))
    assert one[BASELINE]["prompts"] == other[BASELINE]["prompts"] != one["presence"]["prompts"]
    assert problems(child(STOCK, 2, one), child("overlaid", 2, other)) == []
    assert draw(Place(1, "row", "case"), 3, 4, 9) == draw(Place(1, "row", "case"), 3, 4, 9)
    text = [50, 51]
    assert {*draw(Place(1, "row", "case"), 1, 40, 9, text)[0]} == {*text}


def test_bad_words_are_cut_from_what_the_same_prompts_returned() -> None:
    row = ROWS["pull-23569"].sized("tiny")
    engine, inner = driven(row)
    for name in (BASELINE, "5 bad words"):
        driver._case(engine, row, Place(1, row.name, name), Interference(), False)
    batch = row.engine.batch
    _, baseline, _, bad = (inner.prompts[n * batch : (n + 1) * batch] for n in range(4))
    assert baseline == bad


def test_old_prompts_and_other_prompts_are_a_problem() -> None:
    engine, _ = driven(ROW)
    first, second = measured(engine, 1), measured(engine, 2)
    ours = [child(STOCK, 1, first), child(STOCK, 2, second), child("overlaid", 1, first)]
    (again, *_) = problems(*ours, child("overlaid", 2, first))
    assert again == "overlaid round 2: its prompts are those of round 1"
    assert "overlaid round 2: its prompts are not those of stock round 2" in problems(
        *ours, child("overlaid", 2, first)
    )
    assert problems(*ours, child("overlaid", 2, second)) == []


def lose_a_token(cases: dict[str, Any], inner: Remembering) -> None:
    cases[BASELINE]["counts"]["tokens"][0] -= 1


def lose_logprobs(cases: dict[str, Any], inner: Remembering) -> None:
    cases[BASELINE]["counts"]["logprobs"] = [127, 128]


def lose_a_request(cases: dict[str, Any], inner: Remembering) -> None:
    cases[BASELINE]["counts"]["tokens"][0] -= ROW.output


@pytest.mark.parametrize(
    ("cheat", "told"),
    [(lose_a_token, " tokens"), (lose_logprobs, "127 of 128 logprobs"), (lose_a_request, "tokens")],
)
def test_fewer_tokens_and_logprobs_are_refused(
    cheat: Callable[[dict[str, Any], Remembering], None], told: str
) -> None:
    stock = measured(driven(ROW)[0], 1)
    engine, inner = driven(ROW)
    ours = measured(engine, 1)
    assert ours[BASELINE]["counts"]["tokens"][0] == ROW.output * ROW.engine.batch
    cheat(ours, inner)
    (problem,) = problems(child(STOCK, 1, stock), child("overlaid", 1, ours))
    assert problem.startswith("overlaid round 1: ")
    assert told in problem


#: Counts time at half the speed, as a side could that patches the clock, and says what it took.
SLOW = """
import sys, time
from bench.compare import clock
real = time.perf_counter_ns
time.perf_counter_ns = lambda: real() // 2
with clock.told("case") as telling:
    began = time.perf_counter_ns()
    time.sleep(1)
    ended = time.perf_counter_ns()
print(ended - began, telling.longest)
"""


def test_a_slow_clock_is_refused() -> None:
    with clock.listening() as listener:
        env = {**os.environ, **listener.variable("a side"), "PYTHONPATH": str(REPO / "scripts")}
        done = subprocess.run(
            [sys.executable, "-c", SLOW], env=env, capture_output=True, text=True, check=True
        )
        heard = listener.between("a side", "case")
        assert heard is not None
        own, longest = map(int, done.stdout.split())
        assert (problem := clock.problem(own, longest, heard))
        assert problem.startswith("its clock counted ")


@pytest.mark.parametrize(
    ("own", "longest", "heard", "right"),
    [
        (1.0, 1.0, 1.01, True),
        (20.0, 20.0, 20.3, True),
        (10.0, 10.0, 10.4, False),  # it is slow
        (10.4, 10.4, 10.0, False),  # it is fast
        (0.28, 0.45, 0.43, True),  # it had to wait before it began, or after it had ended
        (0.28, 0.30, 0.43, False),
        (1.0, 1.0, None, False),
    ],
)
def test_clocks_may_differ_a_little(
    own: float, longest: float, heard: float | None, right: bool
) -> None:
    nanoseconds = [None if one is None else round(one * 1e9) for one in (own, longest, heard)]
    assert nanoseconds[0] is not None
    assert nanoseconds[1] is not None
    assert (clock.problem(nanoseconds[0], nanoseconds[1], nanoseconds[2]) is None) == right


def test_the_moment_counts_at_which_a_child_tells_and_not_when_it_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The listening thread is kept from running for a second."""
    with clock.listening() as listener:
        for name, value in listener.variable("child").items():
            monkeypatch.setenv(name, value)
        kept = threading.Event()
        heard = listener._heard

        class Late(dict[str, int]):
            def __setitem__(self, label: str, moment: int) -> None:
                kept.wait()
                super().__setitem__(label, moment)

        listener._heard = Late(heard)
        with clock.told("case") as telling:
            pass
        time.sleep(1)
        kept.set()
        found = listener.between("child", "case")
        assert found is not None
        assert found < telling.longest + clock.SLACK * 1e9


def test_a_child_that_says_nothing_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_PATIENCE", 0.0)
    with clock.told("nobody listens"):
        pass
    with clock.listening() as listener:
        for name, value in listener.variable("child").items():
            monkeypatch.setenv(name, value)
        assert listener.between("child", "case") is None
    with clock.told("nobody listens any more"):
        pass


def test_the_engine_s_run_compares_each_child_s_clock(tmp_path: Path) -> None:
    from bench.compare.run import Job
    from bench.engine import EngineRun

    class Listener(clock.Clock):
        def __init__(self) -> None:
            pass

        def between(self, child: str, first: str, last: str | None = None) -> int | None:
            assert (child, json.loads(first)) == (job.name, [3, ROW.name, BASELINE, False])
            return 4_000_000_000

    job = Job("group", "overlaid", 3)
    run = EngineRun.__new__(EngineRun)
    nothing: Any = type("Args", (), {"keep": False})
    run.args, run.clock = nothing, Listener()
    half = CaseResult({}, {}, clock=[2_000_000_000, 2_000_000_001])
    run._check_clock(job, ROW.name, {BASELINE: half})
    assert half.problems == [
        "its clock counted 2.00 s, the parent's 4.00 s: it runs at 0.50 of the speed"
    ]
    assert half.clock == [2_000_000_000, 2_000_000_001, 4_000_000_000]
