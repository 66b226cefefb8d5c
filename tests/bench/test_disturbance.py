"""Disturbances are read from the kernel's counters, and large ones are reported."""

from pathlib import Path

import pytest
from bench.harness import disturbance
from bench.harness.disturbance import LIMIT, during, reasons, snapshot

SECOND = 1_000_000_000


def proc(root: Path, **tasks: tuple[int, int]) -> Path:
    """A /proc in which process 7 started process 9, and process 8 is another's.

    Args:
        root: the directory.
        tasks: "PROCESS_THREAD" to its running and delayed seconds.
    """
    parents = {7: 1, 9: 7, 8: 1}
    for number, parent in parents.items():
        (root / f"{number}").mkdir(parents=True, exist_ok=True)
        (root / f"{number}" / "stat").write_text(f"{number} (a) b) S {parent} 0 0")
    for name, (running, delayed) in tasks.items():
        process, thread = name.strip("p").split("_")
        task = root / process / "task" / thread
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{running * SECOND} {delayed * SECOND} 3\n")
    return root


def machine(root: Path, steal: int) -> None:
    (root / "stat").write_text(f"cpu  100 0 0 800 0 0 0 {steal} 50 0\ncpu0 1 2 3\n")


def test_the_threads_of_a_process_and_of_those_that_it_started_are_counted(tmp_path: Path) -> None:
    root = proc(tmp_path, p7_7=(10, 1), p9_9=(1, 0), p8_8=(99, 99))
    machine(root, 0)
    before = snapshot(7, root)
    proc(tmp_path, p7_7=(18, 3), p9_9=(2, 0), p9_10=(1, 0), p8_8=(999, 999))
    machine(root, 100)
    after = snapshot(7, root)
    # Of the busiest; of all it is 2 / 12.
    assert during(before, after) == {
        "run delay": pytest.approx(2 / 10),
        "steal": pytest.approx(1.0),
    }
    assert sum(thread.running for thread in disturbance.spent(before, after)) == 10 * SECOND


def test_a_kernel_that_counts_nothing_says_nothing(tmp_path: Path) -> None:
    root = proc(tmp_path, p7_7=(0, 0))
    found = during(snapshot(7, root), snapshot(7, root))
    assert found == {"run delay": None, "steal": None}
    assert reasons(found) == reasons(None) == []


def test_this_process_has_counts() -> None:
    before = snapshot()
    sum(range(10**6))
    assert during(before, snapshot())["run delay"] is not None


def test_too_much_of_a_disturbance_is_a_reason() -> None:
    assert reasons({"run delay": LIMIT, "steal": 0.0}) == []
    assert reasons({"run delay": 0.071, "steal": 0.2}) == ["run delay 7.1%", "steal 20.0%"]
