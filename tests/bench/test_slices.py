"""Slices by turns: one process runs at a time, and its clock stands still while others run."""

import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from bench.compare import disturbance
from bench.compare.intervals import LEAST, interval
from bench.engines.slices import Active, Baton, Slices
from support.sites import REPO

#: Notes when it began and ended each piece of work.
WORKER = """
import sys, time
from pathlib import Path
from bench.engines.slices import Baton, Slices
place, pieces = int(sys.argv[2]), int(sys.argv[3])
slices = Slices(Baton(Path(sys.argv[1])), place, 2, int)
slices.wait()
slices.begin()
for _ in range(pieces):
    began = time.perf_counter_ns()
    time.sleep(0.002)
    print(began, time.perf_counter_ns())
    slices.step()
slices.leave()
"""


def test_processes_run_by_turns_until_each_has_ended(tmp_path: Path) -> None:
    counts = [9, 5, 12]
    baton = Baton.make(tmp_path / "baton", 3)
    command = [sys.executable, "-c", WORKER, str(tmp_path / "baton")]
    workers = [
        subprocess.Popen(
            [*command, str(place), str(count)],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(REPO / "scripts")},
        )
        for place, count in enumerate(counts)
    ]
    baton.offer([1, 2, 0])
    work = []
    for place, worker in enumerate(workers):
        printed, _ = worker.communicate(timeout=120)
        assert worker.returncode == 0
        pieces = [line.split() for line in printed.splitlines()]
        work += [(int(began), int(ended), place) for began, ended in pieces]
    work.sort()
    assert [sum(each[2] == place for each in work) for place in range(3)] == counts
    assert all(one[1] <= other[0] for one, other in pairwise(work))
    order = [place for _, _, place in work]
    assert order[:12] == [1, 1, 2, 2, 0, 0] * 2
    assert order[12:] == [1, 2, 2, 0, 0, 2, 2, 0, 0, 2, 2, 0, 2, 2]


def test_the_kernels_counts_are_taken_around_the_turns_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[object] = []

    def look() -> int:
        order.append("look")
        return len(order)

    monkeypatch.setattr(disturbance, "snapshot", look)
    monkeypatch.setattr(Baton, "wait", lambda self, place: order.append("others"))
    baton = Baton.make(tmp_path / "baton", 1)
    slices = Slices(baton, 0, 2, lambda: order.append("synchronize"))
    slices.begin()
    order.clear()
    for _ in range(4):
        slices.step()
    assert order == ["synchronize", "look", "others", "look"] * 2
    assert list(map(str, slices.looks)) == ["2", "4", "6", "8"]
    assert len(slices.pauses) == 2
    slices.begin()
    assert slices.looks == []


#: Prints whether its worker is stopped, in and after each turn of others.
STARTER = """
import subprocess, sys, time
from pathlib import Path
from bench.engines.slices import Baton, Slices
child = subprocess.Popen(["sleep", "1000"])
def look(*_):
    time.sleep(0.1)  # signals take effect some time
    state = Path(f"/proc/{child.pid}/stat").read_text().split()[2]
    print("stopped" if state == "T" else "runs")
slices = Slices(Baton.make(Path(sys.argv[1]), 1), 0, 1, int, [child.pid])
Baton.wait = look
for turn in (slices.begin, slices.step, slices.leave, slices.wait):
    turn()
    look()
child.kill()
"""


def test_workers_are_stopped_while_others_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTER, str(tmp_path / "baton")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts")},
    )
    assert done.stdout.split() == ["stopped", "runs"] * 2 + ["stopped"] + ["stopped", "runs"]


def test_one_that_has_ended_is_passed_over(tmp_path: Path) -> None:
    baton = Baton.make(tmp_path / "baton", 3)
    baton.offer([0, 1, 2])
    baton.leave(1)
    baton.wait(0)
    baton.pass_on(0)
    baton.wait(2)
    baton.leave(2)
    baton.wait(0)


def test_a_clock_stands_still_in_pauses() -> None:
    clock = Active([(10, 20), (25, 40)])
    moments = [5, 10, 15, 20, 24, 25, 39, 41]
    assert [clock.at(moment) for moment in moments] == [5, 10, 10, 10, 14, 15, 15, 16]
    assert clock.crossed(9, 21)
    assert not clock.crossed(11, 19)
    assert not clock.crossed(20, 25)


def test_a_slice_is_from_its_first_output_to_its_last() -> None:
    second = 1_000_000_000
    stamps = [at * second for at in (0, 1, 2, 3, 50, 52, 54, 90)]
    speeds = Active([(4 * second, 49 * second), (55 * second, 89 * second)]).speeds(stamps)
    assert speeds == [1.0, 0.5]


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.03), (0.03, 0.01)])
def test_equal_sides_are_told_apart_as_rarely_as_said(between: float, within: float) -> None:
    """Of 400 runs with one claim 5% may be wrong: 20, and 36 only once in 2,000 times."""
    chance = random.Random(3)
    wrong = 0
    for _ in range(400):
        rounds = []
        for _ in range(5):
            round_ = chance.gauss(0, between)
            rounds.append([2.718 ** (round_ + chance.gauss(0, within)) for _ in range(16)])
        found = interval(rounds, 1)
        assert found is not None
        wrong += not found.low <= 1 <= found.high
    assert 6 < wrong < 36


def test_a_difference_is_found_and_more_claims_need_more() -> None:
    chance = random.Random(5)
    rounds = [[1.05 + chance.gauss(0, 0.01) for _ in range(16)] for _ in range(5)]
    one, many = interval(rounds, 1), interval(rounds, 40)
    assert one is not None
    assert many is not None
    assert 1 < many.low < one.low < one.ratio < one.high < many.high
    assert interval(rounds[: LEAST - 1], 1) is None
