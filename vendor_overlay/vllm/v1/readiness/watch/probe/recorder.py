"""The recorder: what one process records, the thread that writes it, and when."""

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

#: Seconds between two updates of the histograms on /metrics.
PERIOD = 2.0
#: The signal that makes a process write its file.
SIGNAL = signal.SIGUSR2

now = time.perf_counter_ns


class ThreadState(threading.local):
    """What the current thread is doing.

    Attributes:
        output_step: the step whose output the thread is fetching; 0: none, and its fences
            count for the newest step.
        event: the event that the thread has last seen complete.
        seen: when that was, on the records' clock.
        waited: whether the thread waited for ``event`` until then.
        timing: whether events created now are made with timing.
        idle: whether the thread's runner is in a step that serves no request.
        pending: since when the thread's engine core can but wait for tokens that a grammar needs,
            on the records' clock; 0: it has something to do.
    """

    output_step = 0
    event: Any = None
    seen = 0
    waited = False
    timing = False
    idle = False
    pending = 0


this_thread = ThreadState()


class Recorder:
    """The records of one process.

    Attributes:
        ring: the records.
        names: the owners of fences; a fence's ``owner`` is an index into this list.
        step: the number of the worker's newest step.
        continuing: how many requests that step continues.
    """

    def __init__(self, path: str, ring: Ring | None = None) -> None:
        self.path = path
        self.ring = ring or Ring()
        self.names: list[str] = []
        self.step = 0
        self.continuing = 0
        self.started = _started
        self._clock = DeviceClock()
        self._device = "CPU"
        self._owners: dict[str, int] = {}
        self._last_output = 0
        self._last_output_step = 0
        self._worker_config: Any = None
        self._engine_config: Any = None
        self._owners_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._wake: int | None = None
        self._histograms: Histograms | None = None
        self._values: list[gauges.Value] = []
        self._cursor = 0
        self._written = 0
        self._file: RecordFile | None = None

    def label(self) -> str:
        """Name this process as its files do: ``rank0``, ``dp1-rank0``, ``engine0``."""
        config = self._worker_config or self._engine_config
        parallel = getattr(config, "parallel_config", None)
        rank = getattr(parallel, "rank", 0)
        # Independent replicas differ in this number alone.
        replica = getattr(parallel, "data_parallel_index", 0)
        if self._worker_config is None:
            return f"engine{replica}"
        replicated = replica or getattr(parallel, "data_parallel_size", 1) > 1
        return f"dp{replica}-rank{rank}" if replicated else f"rank{rank}"

    def _workers(self) -> list[str]:
        """The labels of all workers of the engine, on all hosts."""
        parallel = getattr(self._worker_config or self._engine_config, "parallel_config", None)
        ranks = range(getattr(parallel, "world_size", 1))
        replicas = getattr(parallel, "data_parallel_size", 1)
        if replicas == 1:
            return [f"rank{rank}" for rank in ranks]
        return [f"dp{replica}-rank{rank}" for replica in range(replicas) for rank in ranks]

    def identified(self) -> bool:
        """Whether this process is known to run a worker or an engine core.

        It is not while an engine starts.
        """
        return self._worker_config is not None or self._engine_config is not None

    def begin_step(self, config: Any, continuing: int) -> int:
        """Begin a worker's step, and return its number."""
        if self._worker_config is None:
            with _errors_logged("the device has no name"):
                self._device = _device_name()
        self._worker_config = config
        self.step += 1
        self.continuing = continuing
        return self.step

    def set_engine(self, config: Any) -> None:
        """Note that this process runs an engine core."""
        self._engine_config = config

    def record(self, kind: int, began: int, step: int | None = None, owner: int = 0) -> int:
        """Record something that this thread did from ``began`` until now.

        Args:
            kind: see :data:`ring.KINDS`.
            began: in nanoseconds of ``time.perf_counter_ns``.
            step: its number; None: the newest step.
            owner: see :data:`ring.FIELDS`.

        Returns:
            When it ended.
        """
        ended = now()
        step = self.step if step is None else step
        self.ring.put(kind, began, ended, step, owner, threading.get_ident())
        return ended

    def record_output(self, ended: int, step: int, continuing: int) -> None:
        """Record that an output was delivered; a second call for one step does nothing."""
        if step == self._last_output_step:
            return
        self._last_output_step = step
        if self._last_output:
            self.ring.put(OUTPUT, self._last_output, ended, step, continuing, threading.get_ident())
        self._last_output = ended

    def record_readback(self, started: Any, launched: int, step: int) -> None:
        """Record a readback whose event this thread has just seen complete.

        Args:
            started: an event with timing before the copy; None: there is no device.
            launched: when the host launched the copy.
            step: the number of the step that it belongs to.
        """
        ready, seen = this_thread.event, this_thread.seen
        if started is None or ready is None:
            return
        try:
            began, ended = self._clock.times(started, ready, launched, seen, this_thread.waited)
        except RuntimeError as error:
            log_once(f"events have no timing, and readbacks are left out: {error}")
            return
        self.ring.put(READBACK, began, ended, step, 0, seen)

    def record_fence(self, owner: str, began: int, ended: int) -> None:
        """Record a wait of this thread for the device."""
        step = this_thread.output_step or self.step
        self.ring.put(FENCE, began, ended, step, self.owner(owner), threading.get_ident())

    def owner(self, name: str) -> int:
        """The index of a fence owner's name; a new name is added."""
        index = self._owners.get(name)
        if index is None:
            with self._owners_lock:
                index = self._owners.setdefault(name, len(self.names))
                if index == len(self.names):
                    self.names.append(name)
        return index

    def start_thread(self) -> None:
        """Start the thread that updates /metrics, and writes files on request."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wake = sender
        thread = threading.Thread(
            target=self._serve, args=(receiver,), name="readiness-probe", daemon=True
        )
        thread.start()
        # Also runs in processes that multiprocessing ends without atexit.
        util.Finalize(None, self.close, exitpriority=100)

    def write(self) -> None:
        """Write the file; an error is logged once, and not raised."""
        label = self.label()
        path = f"{self.path}.{label}"
        with _errors_logged(f"cannot write {switch.shown(path)}"), self._write_lock:
            self._written = self.ring.count
            if not claims.claim(self.path):
                log_once(
                    f"another engine records to {switch.shown(self.path)}, and this one is not "
                    "written anywhere; name another file"
                )
                return
            before = self._file
            if before is None or before.path != path:
                self._file = RecordFile(self.ring, path)
            assert self._file is not None
            self._file.write(lambda: self._header(label))
            if before is not None and before.path != path:
                # An engine core that had not run its worker's first step when it wrote that.
                _remove_own_file(before.path)

    def close(self) -> None:
        """Write the file for the last time, and remove the histograms' file."""
        self.write()
        with self._write_lock:
            if self._histograms is not None:
                self._histograms.remove()

    def request_write(self) -> None:
        """Let the probe's thread write the file soon; safe in a signal handler."""
        if self._wake is not None:
            with suppress(BlockingIOError):  # enough requests are waiting
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
                self.write()  # nobody is served now; vLLM may end this process by SIGKILL
            with _errors_logged("the histograms on /metrics are not up to date"):
                self._update_histograms()

    def _update_histograms(self) -> None:
        records, self._cursor = self.ring.since(self._cursor)
        values = gauges.collect()
        if not len(records) and (self._histograms is None or values == self._values):
            return
        with self._write_lock:
            if not claims.claim(self.path):
                return  # the file is another engine's
            if self._histograms is None:
                self._histograms = Histograms(KINDS)
            self._histograms.update(records, list(self.names))
            self._histograms.write(f"{self.path}.{self.label()}{SUFFIX}", values)
            self._values = values

    def _header(self, label: str) -> dict[str, object]:
        torch = sys.modules.get("torch")
        vllm = sys.modules["vllm"]
        digest = identity.digest()
        return {
            "label": label,
            "pid": os.getpid(),
            "boot": boot_id(),
            "engine": claims.engine_id(),
            "workers": self._workers(),
            "thread": threading.main_thread().ident,
            "owners": list(self.names),
            "vllm": getattr(vllm, "__version__", "unknown"),
            "overlay": __version__ if digest else None,
            "digest": digest,
            "features": sorted(switch.enabled()) if digest else [],
            "torch": getattr(torch, "__version__", None),
            "device": self._device,
            "command": sys.argv,
            "started_unix_ns": self.started[0],
            "started_ns": self.started[1],
            "written_ns": now(),
        }


_recorder: Recorder | None = None
_recorder_lock = threading.Lock()
#: The file that VLLM_READINESS_PROBE names; None: the probe is off.
_path: str | None = None
#: When this process began to be observed: Unix time, and time on the records' clock.
_started = (time.time_ns(), now())


def enable(path: str) -> bool:
    """Let this process, and its forks, record to ``path``.

    Returns:
        True if enabled now; False if it was enabled before.
    """
    global _path, _started  # noqa: PLW0603
    if _path is not None:
        return False
    _path = path
    _started = (time.time_ns(), now())
    os.register_at_fork(after_in_child=_reset_after_fork)
    return True


def recorder() -> Recorder:
    """Return this process's recorder; the first call creates it, and starts its thread."""
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
    """Return this process's recorder; None: nothing has been recorded."""
    return _recorder


def record_fence(owner: str, began: int, ended: int) -> None:
    """Record a wait; one while an engine starts belongs to no step, and is left out."""
    if _recorder is not None and _recorder.identified():
        _recorder.record_fence(registry.GRAMMARS if this_thread.pending else owner, began, ended)


def listen() -> None:
    """Write this process's file on SIGUSR2; ignore the signal if there are no records.

    Unhandled, the signal would end a process, and not every process of a server records.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, _on_signal):
        signal.signal(SIGNAL, _on_signal)
    else:
        log_once("SIGUSR2 is taken; files are written at exit alone")


def _on_signal(*_: object) -> None:
    if _recorder is not None:
        _recorder.request_write()


def _reset_after_fork() -> None:
    """Forget the parent's recorder; a child that has something to record creates its own."""
    global _recorder, _recorder_lock, _started  # noqa: PLW0603
    _recorder, _recorder_lock = None, threading.Lock()
    _started = (time.time_ns(), now())


def _device_name() -> str:
    torch = sys.modules.get("torch")
    # A name is not worth a context on a device that this process does not use.
    if torch is None or not torch.cuda.is_initialized():
        return "CPU"
    return str(torch.cuda.get_device_name())


def _remove_own_file(path: str) -> None:
    """Remove a file of this process, unless another process has replaced it."""
    with suppress(FileNotFoundError):
        with open(path, "rb") as file:
            own = json.loads(file.readline())["pid"] == os.getpid()
        if own:
            os.unlink(path)


@contextmanager
def _errors_logged(failure: str) -> Iterator[None]:
    """Log an error in the body once; it ends neither a thread nor an engine."""
    try:
        yield
    except Exception as error:
        log_once(f"{failure}: {type(error).__name__}: {error}")


@lru_cache
def log_once(sentence: str) -> None:
    """Log a warning, unless it has been logged."""
    logger.warning("%s: %s", switch.PROBE, sentence)
