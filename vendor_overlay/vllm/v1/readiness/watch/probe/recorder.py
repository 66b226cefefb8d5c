"""Recorder of a process, with a thread that writes files."""

# mirrors: nothing

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing import util
from typing import Any

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import gauges, identity, switch
from vllm.v1.readiness.version import __version__
from vllm.v1.readiness.watch.probe import claims
from vllm.v1.readiness.watch.probe.clock import DeviceClock
from vllm.v1.readiness.watch.probe.files import RecordFile
from vllm.v1.readiness.watch.probe.histograms import SUFFIX, Histograms, boot_id
from vllm.v1.readiness.watch.probe.ring import FENCE, KINDS, OUTPUT, READBACK, Ring

logger = logging.getLogger(__name__)

#: Seconds between updates of the histograms on /metrics.
PERIOD = 2.0
#: Signal on which a process writes its file.
SIGNAL = signal.SIGUSR2

now = time.perf_counter_ns


class ThreadState(threading.local):
    """State of the current thread. Times are values of ``time.perf_counter_ns``.

    Attributes:
        output_step: step to which fences are attributed; 0 for the newest step.
        event, seen, waited: last event that the thread saw complete, the time at which it did, and
            whether it waited for the event.
        timing: whether new events are created with timing.
        idle: whether the current step is not recorded.
        pending: when the engine core began to wait for tokens that grammars need, or 0.
    """

    event: Any = None
    output_step = seen = pending = 0
    waited = timing = idle = False


this_thread = ThreadState()


class Recorder:
    """The records of one process.

    Attributes:
        step: number of the worker's newest step.
        continuing: number of cached requests in this step.
    """

    def __init__(self, path: str, ring: Ring | None = None) -> None:
        self.path, self.ring = path, ring or Ring()
        self.step = self.continuing = 0
        self.started = _started
        self._clock = DeviceClock()
        self._device = "CPU"
        self._owners: dict[str, int] = {}
        self._last_output = self._last_output_step = 0
        self._worker_config: Any = None
        self._engine_config: Any = None
        self._owners_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._wake: int | None = None
        self._histograms: Histograms | None = None
        self._values: list[gauges.Value] = []
        self._cursor = self._written = 0
        self._file: RecordFile | None = None

    def label(self) -> str:
        """Return the label in file names, such as ``rank0``, ``dp1-rank0`` or ``engine0``."""
        config = self._worker_config or self._engine_config
        parallel = getattr(config, "parallel_config", None)
        rank = getattr(parallel, "rank", 0)
        # Independent replicas differ only in this number.
        replica = getattr(parallel, "data_parallel_index", 0)
        if self._worker_config is None:
            return f"engine{replica}"
        replicated = replica or getattr(parallel, "data_parallel_size", 1) > 1
        return f"dp{replica}-rank{rank}" if replicated else f"rank{rank}"

    def _workers(self) -> list[str]:
        """Return the labels of all workers of the engine, on all hosts."""
        parallel = getattr(self._worker_config or self._engine_config, "parallel_config", None)
        ranks = range(getattr(parallel, "world_size", 1))
        replicas = getattr(parallel, "data_parallel_size", 1)
        if replicas == 1:
            return [f"rank{rank}" for rank in ranks]
        return [f"dp{replica}-rank{rank}" for replica in range(replicas) for rank in ranks]

    def identified(self) -> bool:
        """Return whether a worker or an engine core has begun a step in this process."""
        return self._worker_config is not None or self._engine_config is not None

    def begin_step(self, config: Any, continuing: int) -> int:
        """Begin a worker's step, and return its number."""
        if self._worker_config is None:
            with _errors_logged("cannot read the device's name"):
                self._device = _device_name()
        self._worker_config = config
        self.step += 1
        self.continuing = continuing
        return self.step

    def set_engine(self, config: Any) -> None:
        """Mark this process as one that runs an engine core."""
        self._engine_config = config

    def record(self, kind: int, began: int, step: int | None = None, owner: int = 0) -> int:
        """Record this thread's work from ``began`` until now, and return the current time.

        ``step`` is the newest step by default. For ``owner``, see :data:`ring.FIELDS`.
        """
        ended = now()
        step = self.step if step is None else step
        self.ring.put(kind, began, ended, step, owner, threading.get_ident())
        return ended

    def record_output(self, ended: int, step: int, continuing: int) -> None:
        """Record the delivery of an output; a second call for a step is a no-op."""
        if step == self._last_output_step:
            return
        self._last_output_step = step
        if self._last_output:
            self.ring.put(OUTPUT, self._last_output, ended, step, continuing, threading.get_ident())
        self._last_output = ended

    def record_readback(self, started: Any, launched: int, step: int) -> None:
        """Record a readback that the host launched at ``launched`` and this thread has read.

        ``started`` is an event with timing, recorded before the copy; None without a device.
        """
        ready, seen = this_thread.event, this_thread.seen
        if started is None or ready is None:
            return
        try:
            began, ended = self._clock.times(started, ready, launched, seen, this_thread.waited)
        except RuntimeError as error:
            log_once(f"readbacks are not recorded because events have no timing: {error}")
            return
        self.ring.put(READBACK, began, ended, step, 0, seen)

    def record_fence(self, owner: str, began: int, ended: int) -> None:
        """Record a wait of this thread for the device."""
        step = this_thread.output_step or self.step
        self.ring.put(FENCE, began, ended, step, self.owner(owner), threading.get_ident())

    def owner(self, name: str) -> int:
        """Return the index of an owner's name; a new name is added."""
        with self._owners_lock:
            return self._owners.setdefault(name, len(self._owners))

    def start_thread(self) -> None:
        """Start the thread that updates histograms and writes files; write at exit, too."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wake = sender
        thread = threading.Thread(
            target=self._serve, args=(receiver,), name="readiness-probe", daemon=True
        )
        thread.start()
        # Processes of multiprocessing skip atexit.
        util.Finalize(None, self.close, exitpriority=100)

    def write(self) -> None:
        """Write the file; log the first error, and never raise."""
        label = self.label()
        path = f"{self.path}.{label}"
        with _errors_logged(f"cannot write {switch.shown(path)}"), self._write_lock:
            self._written = self.ring.count
            if not claims.claim(self.path):
                log_once(
                    f"another engine records to {switch.shown(self.path)}; this engine writes "
                    "nothing. Name another file"
                )
                return
            before = self._file
            if before is None or before.path != path:
                self._file = RecordFile(self.ring, path)
            assert self._file is not None
            self._file.write(lambda: self._header(label))
            if before is not None and before.path != path:
                # The label was an engine core's before the worker's first step.
                _remove_own_file(before.path)

    def close(self) -> None:
        """Write the file for the last time, and remove the histograms' file."""
        self.write()
        with self._write_lock:
            if self._histograms is not None:
                self._histograms.remove()

    def request_write(self) -> None:
        """Wake the probe's thread to write the file; safe in a signal handler."""
        if self._wake is not None:
            with suppress(BlockingIOError):  # the pipe is full
                os.write(self._wake, b"!")

    def _serve(self, receiver: int) -> None:
        poll = select.poll()
        poll.register(receiver, select.POLLIN)
        while True:
            count = self.ring.count
            if poll.poll(PERIOD * 1e3):
                os.read(receiver, 4096)
                self.write()
            elif count == self.ring.count != self._written:
                self.write()  # while idle: vLLM may SIGKILL this process later
            with _errors_logged("cannot update the histograms on /metrics"):
                self._update_histograms()

    def _update_histograms(self) -> None:
        records, self._cursor = self.ring.since(self._cursor)
        values = gauges.collect()
        if not len(records) and (self._histograms is None or values == self._values):
            return
        with self._write_lock:
            if not claims.claim(self.path):
                return  # another engine has claimed the path
            if self._histograms is None:
                self._histograms = Histograms(KINDS)
            self._histograms.update(records, list(self._owners))
            self._histograms.write(f"{self.path}.{self.label()}{SUFFIX}", values)
            self._values = values

    def _header(self, label: str) -> dict[str, object]:
        digest = identity.digest()
        return {
            "label": label,
            "pid": os.getpid(),
            "boot": boot_id(),
            "engine": claims.engine_id(),
            "workers": self._workers(),
            "thread": threading.main_thread().ident,
            "owners": list(self._owners),
            "vllm": getattr(sys.modules["vllm"], "__version__", "unknown"),
            "overlay": __version__ if digest else None,
            "digest": digest,
            "features": sorted(switch.enabled()) if digest else [],
            "torch": getattr(sys.modules.get("torch"), "__version__", None),
            "device": self._device,
            "command": sys.argv,
            "started_unix_ns": self.started[0],
            "started_ns": self.started[1],
            "written_ns": now(),
        }


_recorder: Recorder | None = None
_recorder_lock = threading.Lock()
#: The path in VLLM_READINESS_PROBE; None if the probe is off.
_path: str | None = None
#: Start of recording, in ``time.time_ns`` and ``time.perf_counter_ns``.
_started = (time.time_ns(), now())


def enable(path: str) -> bool:
    """Make this process and its forks record to ``path``; False if already enabled."""
    global _path, _started  # noqa: PLW0603
    if _path is not None:
        return False
    _path = path
    _started = (time.time_ns(), now())
    os.register_at_fork(after_in_child=_reset_after_fork)
    return True


def recorder() -> Recorder:
    """Return this process's recorder; the first call creates it and starts its thread."""
    global _recorder  # noqa: PLW0603
    if _recorder is None:
        with _recorder_lock:
            if _recorder is None:
                assert _path is not None
                created = Recorder(_path)
                created.start_thread()
                _recorder = created
    return _recorder


def existing() -> Recorder | None:
    """Return this process's recorder; None if it has recorded nothing."""
    return _recorder


def record_fence(owner: str, began: int, ended: int) -> None:
    """Record a wait of this thread for the device, except during the engine's start-up."""
    if _recorder is not None and _recorder.identified():
        _recorder.record_fence(registry.GRAMMARS if this_thread.pending else owner, began, ended)


def listen() -> None:
    """Install a handler that writes this process's file on SIGUSR2.

    Called in all processes, because without a handler the signal kills a process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, _on_signal):
        signal.signal(SIGNAL, _on_signal)
    else:
        log_once("SIGUSR2 has a handler; files are written only at exit and when idle")


def _on_signal(*_: object) -> None:
    if _recorder is not None:
        _recorder.request_write()


def _reset_after_fork() -> None:
    """Drop the parent's recorder in a forked child, which creates its own."""
    global _recorder, _recorder_lock, _started  # noqa: PLW0603
    _recorder, _recorder_lock = None, threading.Lock()
    _started = (time.time_ns(), now())


def _device_name() -> str:
    torch = sys.modules.get("torch")
    # Do not create a CUDA context for the name.
    if torch is None or not torch.cuda.is_initialized():
        return "CPU"
    return str(torch.cuda.get_device_name())


def _remove_own_file(path: str) -> None:
    """Remove a file of this process, unless another process has replaced it."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        if json.loads(file.readline())["pid"] == os.getpid():
            os.unlink(path)


@contextmanager
def _errors_logged(failure: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        log_once(f"{failure}: {type(error).__name__}: {error}")


@lru_cache
def log_once(sentence: str) -> None:
    """Log a warning once per distinct text."""
    logger.warning("%s: %s", switch.PROBE, sentence)
