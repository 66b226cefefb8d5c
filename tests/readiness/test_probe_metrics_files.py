"""The files of the probe's histograms: which of them a scrape shows."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from readiness.alone import ALONE
from readiness.metrics import KINDS, of, page, write


@pytest.fixture
def file(metrics_file: Path) -> Path:
    """The value of VLLM_READINESS_PROBE."""
    return metrics_file


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_process_that_has_ended_is_not_shown(file: Path, warned: Callable[[], list[str]]) -> None:
    """Killed, its file stays; not waited for, it is still in the table of processes."""
    program = f"""{ALONE}
from vllm.v1.readiness.watch.probe.histograms import Histograms
import numpy as np
counted = Histograms({KINDS!r})
counted.update(np.array([[0, 1, 2, 0, 0, 0]]), [])
counted.write({str(of(file, "rank0"))!r})
print(flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        alive = page(file)
        writer.kill()
        assert ("execute_model_seconds_count", "rank0", None, "") in alive
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{writer.pid}").exists()
        assert page(file) == {}
    assert not Path(f"/proc/{writer.pid}").exists()
    assert of(file, "rank0").exists()
    assert page(file) == {}
    assert warned() == []


def test_a_process_with_the_id_of_an_earlier_one_is_not_taken_for_it(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    """Nor one of another boot or host, nor a file that does not name its process."""
    path = of(file, "rank0")
    write(file)
    assert page(file)
    boot, pid, began = json.loads(path.read_text())["instance"].split()
    assert int(pid) == os.getpid()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for instance in (f"{boot} {pid} {int(began) - 1}", f"{'0' * 36} {pid} {began}", None):
        rewritten(path, instance=instance)
        assert page(file) == {}
    rewritten(path, instance=None, pid=2**22 + 1)
    assert page(file) == {}
    assert warned() == []


def test_files_that_only_look_like_ours_are_left_alone(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    """Those of another server's probe, copies, temporary ones, and the records."""
    path = of(file, "rank0")
    write(file)
    expected = page(file)
    content = path.read_bytes()
    others = [f"{file}.other.rank0.metrics", f"{file}rank0.metrics"]
    others += [str(file.with_name(f"{'x' * len(file.name)}.rank0.metrics"))]
    others += [f"{file}.rank0", f"{file}.rank0.metrics.77.new", f"{file}.rank0.old-one"]
    for name in others:
        Path(name).write_bytes(content)
    of(file, "a directory").mkdir()
    os.mkfifo(of(file, "a pipe"))
    assert page(file) == expected
    assert warned() == []


SERIES = {"kind": "execute_model", "owner": None, "counts": [1] * 23, "total": 23}
GARBAGE: dict[str, Any] = {
    "nothing": b"",
    "all but the end": lambda whole: whole[:-1],
    "bytes": bytes(range(256)) * 40,
    "deep": b"[" * 100_000,
    "huge": lambda whole: b" " * (1 << 21) + whole,
    "another form": {"form": 1},
    "other bounds": {"bounds": [1, 2, 3]},
    "no process": {"pid": "../self"},
    "an unknown kind": {"series": [SERIES | {"kind": "lunch"}]},
    "an owner too many": {"series": [SERIES | {"owner": "history"}]},
    "an owner too few": {"series": [SERIES | {"kind": "fence"}]},
    "half a character": {"series": [SERIES | {"kind": "fence", "owner": "\ud800"}]},
    "a bucket too few": {"series": [SERIES | {"counts": [1] * 22}]},
    "a broken count": {"series": [SERIES | {"counts": [1] * 22 + [0.5]}]},
    "a sum beyond floats": {"series": [SERIES | {"total": 10**400}]},
    "a series twice": {"series": [SERIES, SERIES]},
    "an unknown value": {"values": [["lunch", [], 1]]},
    "a label too few": {"values": [["slots", [], 1]]},
    "a label that is no text": {"values": [["slots", [7], 1]]},
    "a broken value": {"values": [["slots", ["penalties"], -1]]},
    "a value twice": {"values": [["slots", ["penalties"], 1]] * 2},
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_left_out_and_logged_once(
    name: str, file: Path, warned: Callable[[], list[str]]
) -> None:
    write(file)
    expected = page(file)
    path = of(file, "rank1")
    write(file, "rank1")
    assert page(file) != expected
    garbage = GARBAGE[name]
    if isinstance(garbage, dict):
        rewritten(path, **garbage)
    else:
        path.write_bytes(garbage if isinstance(garbage, bytes) else garbage(path.read_bytes()))
    for _ in range(3):
        assert page(file) == expected
    assert len(warned()) == 1
    assert str(path) in warned()[0]


def test_a_file_that_cannot_be_replaced_leaves_no_temporary_one(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    of(file, "rank0").mkdir()
    write(file)
    assert list(file.parent.iterdir()) == [of(file, "rank0")]
    assert len(warned()) == 1
