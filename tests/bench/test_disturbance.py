"""What disturbs a process is read from the kernel and the GPU, and what is too much is said."""

from pathlib import Path

import pytest
from bench.harness import disturbance
from bench.harness.disturbance import LIMIT, during, gpus, reasons, snapshot

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
    gpu = {"sm": 1980, "memory": 2619, "celsius": 40, "throttled": "0x0000000000000004"}
    quiet = {"run delay": LIMIT, "steal": 0.0, "gpus": [gpu]}
    assert reasons(quiet) == []
    hot = {**gpu, "throttled": "0x0000000000000020"}
    assert reasons({"run delay": 0.071, "steal": 0.2, "gpus": [gpu, hot]}) == [
        "run delay 7.1%",
        "steal 20.0%",
        "GPU 1 was slowed down (0x0000000000000020)",
    ]


def smi(folder: Path, knows: str) -> None:
    """An nvidia-smi that knows one name of the throttle reasons, and keeps its arguments."""
    file = folder / "nvidia-smi"
    file.write_text(
        f'#!/bin/sh\necho "$@" > {folder}/arguments\n'
        f'case "$1" in *{knows}*) echo "1980, [N/A], 41, 0x0000000000000004";;'
        ' *) echo "not a valid field"; exit 2;; esac\n'
    )
    file.chmod(0o755)


@pytest.mark.parametrize("name", disturbance._QUERIES)
def test_the_clocks_of_gpus_are_those_of_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() is None
    smi(tmp_path, name)
    seen = gpus()
    assert seen is not None
    assert seen[0] == {
        "sm": 1980,
        "memory": None,
        "celsius": 41,
        "throttled": "0x0000000000000004",
    }


@pytest.mark.parametrize(
    ("visible", "asked"), [("1,3", "--id=1,3"), ("", "nounits"), (None, "nounits")]
)
def test_only_the_gpus_that_are_used_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, asked: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    smi(tmp_path, disturbance._QUERIES[0])
    gpus()
    assert (tmp_path / "arguments").read_text().strip().endswith(asked)
