"""When a process writes its file: at its end, on a signal, and after a fork.

A child does what a worker does: it installs the probe, makes some steps and ends.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probe import records
from probe.records import Process
from readiness.stand_ins import StandIns
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import probe
from vllm.v1.readiness.watch.probe import methods, recorder
from vllm.v1.readiness.watch.probe.files import RecordFile

Work = Callable[[Any], None]
FORK: Any = multiprocessing.get_context("fork")


class Child:
    """A forked process that installs the probe and works.

    Args:
        file: the path that it records to; its warnings are in ``file.log``.
        work: is called with the child's end of a pipe.
        engine: the id of the engine that it is a process of; a real one inherits it.
    """

    def __init__(self, file: Path, work: Work, engine: str = "an engine") -> None:
        self.file = file
        self.engine = engine
        self.pipe, its = multiprocessing.Pipe()
        # A daemon, so that a test that fails does not leave one that waits for ever.
        self.process = FORK.Process(target=self._run, args=(work, its), daemon=True)
        self.process.start()

    def _run(self, work: Work, pipe: Any) -> None:
        sink = logging.FileHandler(f"{self.file}.log")
        logger = logging.getLogger("vllm.v1.readiness.watch.probe")
        logger.addHandler(sink)
        logger.setLevel(logging.WARNING)
        os.environ[switch.PROBE] = str(self.file)
        os.environ[switch.PROBE_ENGINE] = self.engine
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # whatever the parent does with it
        probe.install()
        work(pipe)
        sink.flush()

    def receive(self) -> Any:
        """Wait for what it sends."""
        assert self.pipe.poll(60)
        return self.pipe.recv()

    def signal(self) -> None:
        os.kill(self.process.pid, signal.SIGUSR2)

    def join(self) -> None:
        self.process.join(60)
        assert self.process.exitcode == 0

    def end(self) -> None:
        self.pipe.send("end")
        self.join()

    def log(self) -> str:
        return Path(f"{self.file}.log").read_text()

    def written(self, rank: int = 0) -> Process:
        return records.read(Path(f"{self.file}.rank{rank}"))

    def steps(self, rank: int = 0) -> int:
        """Return how many steps there are in its file."""
        return len(self.written(rank).of("execute_model"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path that a child records to; this process records nothing."""
    return tmp_path / "file"


def steps(count: int, rank: int = 0) -> None:
    stand_ins = StandIns(rank=rank)
    for _ in range(count):
        stand_ins.step()


def until(condition: Callable[[], bool]) -> None:
    """Wait for something, but not for ever."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def return_at_once(_: Any) -> None:
    # Many processes that install the probe have nothing to record.
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    steps(3)


def serve_until_sigterm(pipe: Any) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as vLLM's workers do
    steps(3)
    pipe.send("ready")
    time.sleep(60)


@pytest.mark.parametrize("work", [return_at_once, serve_until_sigterm])
def test_a_process_writes_its_file_when_it_ends(work: Work, file: Path) -> None:
    before = time.perf_counter_ns()
    child = Child(file, work)
    if work is serve_until_sigterm:
        assert child.receive() == "ready"
        child.process.terminate()
    child.join()
    assert child.steps() == 3
    assert before < child.written().header["started_ns"] < child.written().spans[0].began


def serve(pipe: Any) -> None:
    steps(2)
    pipe.send("ready")
    while not pipe.poll(0.05):
        pass
    steps(5)


def test_a_process_writes_its_file_on_a_signal_and_goes_on(file: Path) -> None:
    child = Child(file, serve)
    assert child.receive() == "ready"
    for _ in range(3):
        child.signal()
    until(Path(f"{file}.rank0").exists)
    assert child.steps() == 2
    assert child.process.is_alive()
    child.end()
    assert child.steps() == 7


def fail_to_write(pipe: Any) -> None:
    recorder.PERIOD = 0.05
    write = RecordFile.write
    errors = [OSError("the disk is full"), RuntimeError("an error of the device")]
    tries: list[Exception] = []

    def fail(*_: Any) -> None:
        tries.append(errors[len(tries) % 2])
        raise tries[-1]

    class EngineCore:
        def shutdown(self) -> int:
            return len(tries)

    module: Any = SimpleNamespace(EngineCore=EngineCore)
    methods.watch_core(module)
    RecordFile.write = fail  # type: ignore[method-assign, assignment]
    steps(1)
    for count in (1, 2, 3):
        until(lambda least=count: len(tries) >= least)  # type: ignore[misc]
        os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: len(tries) == 4)
    assert EngineCore().shutdown() == 5  # tried before it waits for its workers
    RecordFile.write = write  # type: ignore[method-assign]
    os.kill(os.getpid(), signal.SIGUSR2)
    until(Path(f"{os.environ[switch.PROBE]}.rank0").exists)
    RecordFile.write = fail  # type: ignore[method-assign, assignment]
    pipe.send("written")


def test_errors_of_writing_are_logged_once_and_end_neither_thread_nor_engine(file: Path) -> None:
    child = Child(file, fail_to_write)
    assert child.receive() == "written"
    child.join()
    assert child.steps() == 1
    assert child.log().count("\n") == 2
    assert f"cannot write {file}.rank0: OSError: the disk is full" in child.log()
    assert "rank0: RuntimeError: an error of the device" in child.log()


def fork(pipe: Any) -> None:
    steps(3)
    recorder._recorder_lock.acquire()  # by another thread, for example
    child = os.fork()
    if child:
        recorder._recorder_lock.release()
    else:
        signal.alarm(30)
        with suppress(BaseException):
            steps(2, rank=1)
            recorder.recorder().write()
            threads = [thread.name for thread in threading.enumerate()]
            pipe.send(threads.count("readiness-probe"))
        os._exit(0)
    os.wait()
    steps(1)


def test_a_fork_records_for_itself(file: Path) -> None:
    child = Child(file, fork)
    child.join()
    assert child.receive() == 1
    assert (child.steps(), child.steps(rank=1)) == (4, 2)
    last = child.written().of("sample_tokens")[2]
    assert last.ended < child.written(rank=1).header["started_ns"]


def step_when_told(pipe: Any) -> None:
    steps(2)
    pipe.send("stepped")
    pipe.recv()


def test_an_engine_leaves_the_files_of_another_one_alone_while_that_runs(file: Path) -> None:
    one = Child(file, step_when_told, "one")
    one.receive()
    one.signal()
    until(Path(f"{file}.rank0").exists)
    other = Child(file, step_when_told, "other")
    other.receive()
    other.signal()
    until(lambda: "another engine records to" in other.log())
    other.end()
    assert one.written().header["engine"] == "one"
    assert other.log().count("\n") == 1
    one.end()
    assert one.steps() == 2
    third = Child(file, step_when_told, "third")  # the first has ended
    third.receive()
    third.end()
    assert third.written().header["engine"] == "third"
