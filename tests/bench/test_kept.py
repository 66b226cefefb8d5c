"""Processes that keep an engine answer each request, and failures end a request."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.errors import Failure, Fatal
from bench.harness import kept
from bench.harness.kept import Kept
from support.sites import REPO

#: A driver that counts its turns, and ends or sleeps in the third.
DRIVER = """
import os, sys, time
from pathlib import Path
from bench.harness import kept
kept.ready(Path(sys.argv[1]))
for turn, (path, request) in enumerate(kept.asked(Path(sys.argv[1])), 1):
    if turn == 3 and sys.argv[2] == "error":
        kept.answer(path, {"error": "a stream ended"})
        continue
    if turn == 3:
        time.sleep(60) if sys.argv[2] == "sleep" else sys.exit(7)
    kept.answer(path, {"request": request, "process": os.getpid()})
"""
Start = Callable[[str], Kept]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a driver that ends in the way that is named."""
    processes: list[subprocess.Popen[bytes]] = []

    def started(end: str) -> Kept:
        out = tmp_path / "half-b,-stock.json"
        environment = {**os.environ, "PYTHONPATH": str(REPO / "scripts")}
        command = [sys.executable, "-c", DRIVER, str(out), end]
        processes.append(subprocess.Popen(command, env=environment))
        return Kept(processes[-1], out)

    yield started
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("end", "kind", "reason"),
    [
        ("sleep", Failure, "no end after 0.2 s"),
        ("exit", Failure, r"the process ended \(7\)"),
        ("error", Fatal, "a stream ended"),
    ],
)
def test_one_process_takes_every_turn_until_it_fails(
    start: Start, end: str, kind: type[Failure], reason: str
) -> None:
    kept = start(end)
    kept.started(60)
    for turn in (1, 2):
        kept.ask([turn])
        assert kept.result(60) == {"request": [turn], "process": kept.process.pid}
    kept.ask([3])
    with pytest.raises(kind, match=reason):
        kept.result(0.2 if end == "sleep" else 60)


def test_a_process_ends_when_it_is_asked_nothing_more(start: Start) -> None:
    kept = start("exit")
    kept.ask(None)
    assert kept.process.wait(60) == 0


def test_nothing_is_measured_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            (tmp_path / "out.1.asked").write_text("[1]")

    monkeypatch.setattr(time, "sleep", sleep)
    assert next(kept.asked(tmp_path / "out.json")) == (tmp_path / "out.1.json", [1])
    assert len(waited) == 3
