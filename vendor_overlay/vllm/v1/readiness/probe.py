"""The probe: which part of a step takes how long, and who waits for the device.

With ``VLLM_READINESS_PROBE=FILE`` each process that runs a worker or an engine's core
records the parts of its steps (:data:`probe_ring.KINDS`) into a ring buffer, and writes it
to ``FILE.rank0``, ``FILE.rank1``, ... when it ends, on SIGUSR2, and whenever there has been
nothing to record for a few seconds; a process that has an engine's core and no worker writes
``FILE.engine0``. ``scripts/probe`` reads them.

What is recorded is watched from outside: methods of the runners, of what they hand out,
and of the scheduler are replaced by ones that read the clock before and after. The same
happens on a vLLM without the overlay, where this package is loaded as a plugin, so that
both are measured by one instrument.

A fence is a wait for an event that has not completed. Its owner is the name given to
:func:`fences.wait`; elsewhere it is the function that waits. Waits that are no event's
(``.cpu()``, ``.item()``, blocking copies) count to the function that they are in, and are
not seen as fences.
"""

import importlib.abc
import importlib.machinery
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial, wraps
from importlib.util import find_spec
from multiprocessing import util
from types import ModuleType
from typing import Any

from vllm.v1.readiness import fences, identity, switch
from vllm.v1.readiness.probe_clock import DeviceClock
from vllm.v1.readiness.probe_ring import (
    EXECUTE,
    FENCE,
    GET_OUTPUT,
    KINDS,
    OUTPUT,
    READBACK,
    SAMPLE,
    SCHEDULE,
    UPDATE,
    Ring,
)
from vllm.v1.readiness.version import __version__

logger = logging.getLogger(__name__)

Function = Callable[..., Any]

#: Seconds between two updates of the figures on /metrics.
PERIOD = 2.0
#: What has a process write its file now.
SIGNAL = signal.SIGUSR2

#: How the requests are called that runner V2 warms its kernels up with.
_WARM_UP = "_warmup_"

_now = time.perf_counter_ns


class _Here(threading.local):
    """What this thread is doing.

    Attributes:
        step: whose output it hands out; 0: it works on the newest step.
        event: the one that it has last seen complete.
        seen: when that was.
        waited: whether it waited for it until then.
        timing: whether the events that it makes shall tell the time.
        idle: whether its runner is in a step that serves no request.
    """

    step = 0
    event: Any = None
    seen = 0
    waited = False
    timing = False
    idle = False


_here = _Here()


class Recorder:
    """What one process records.

    Attributes:
        ring: the records.
        names: owners of fences; a record's ``owner`` is an index in here.
        step: the newest step's number.
        continuing: how many requests it continues.
    """

    def __init__(self, path: str, ring: Ring | None = None) -> None:
        self.path = path
        self.ring = ring or Ring()
        self.names: list[str] = []
        self.step = 0
        self.continuing = 0
        self.clock = DeviceClock()
        self.started = _begun
        self._device = "CPU"
        self._owners: dict[str, int] = {}
        self._last_output = 0
        self._last_step = 0
        self._worker: Any = None
        self._engine: Any = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._wake: int | None = None
        self._metrics: Any = None
        self._cursor = 0
        self._written = 0
        self._file: str | None = None

    def label(self) -> str:
        """What this process is, as the names of its files say it."""
        config = self._worker or self._engine
        parallel = getattr(config, "parallel_config", None)
        rank = getattr(parallel, "rank", 0)
        # Replicas that know nothing of each other have this number alone.
        data = getattr(parallel, "data_parallel_index", 0)
        if self._worker is None:
            return f"engine{data}"
        many = data or getattr(parallel, "data_parallel_size", 1) > 1
        return f"dp{data}-rank{rank}" if many else f"rank{rank}"

    def owner(self, name: str) -> int:
        """The index of an owner's name."""
        found = self._owners.get(name)
        if found is None:
            with self._lock:
                found = self._owners.setdefault(name, len(self.names))
                if found == len(self.names):
                    self.names.append(name)
        return found

    def begin(self, config: Any, continuing: int) -> int:
        """A worker begins a step; its number."""
        if self._worker is None:
            with _harmless("the device has no name"):
                self._device = _device()
        self._worker = config
        self.step += 1
        self.continuing = continuing
        return self.step

    def schedules(self, config: Any) -> None:
        """This process has an engine's core."""
        self._engine = config

    def known(self) -> bool:
        """Whether it has been seen what this process is; it is not while an engine starts."""
        return self._worker is not None or self._engine is not None

    def handed_out(self, at: int, step: int, continuing: int) -> None:
        """An output was handed out, maybe by one call within another."""
        if step == self._last_step:
            return
        self._last_step = step
        if self._last_output:
            self.ring.put(OUTPUT, self._last_output, at, step, continuing, threading.get_ident())
        self._last_output = at

    def fence(self, name: str, began: int, ended: int) -> None:
        """Somebody has waited."""
        step = _here.step or self.step
        self.ring.put(FENCE, began, ended, step, self.owner(name), threading.get_ident())

    def run(self) -> None:
        """Start what happens beside the steps: figures for /metrics, and files on a signal."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self._wake = sender
        thread = threading.Thread(
            target=self._serve, args=(receiver,), name="readiness-probe", daemon=True
        )
        thread.start()
        # Also runs in the processes that multiprocessing ends without atexit.
        util.Finalize(None, self.close, exitpriority=100)

    def write(self) -> None:
        """Write the file; an error is logged once, and ends nothing."""
        label = self.label()
        path = f"{self.path}.{label}"
        with _harmless(f"cannot write {switch.shown(path)}"), self._writing:
            self._written = self.ring.count
            self.ring.write(path, lambda: self._header(label))
            before, self._file = self._file, path
            if before is not None and before != path:
                _remove(before)  # of a core that had not made its worker's first step yet

    def close(self) -> None:
        """Write the file for the last time."""
        self.write()
        with self._writing:
            if self._metrics is not None:
                self._metrics.remove()

    def wake(self) -> None:
        """Have the file written soon, by a thread that is not in the middle of a step."""
        if self._wake is not None:
            with suppress(BlockingIOError):  # it has been told often enough
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
            with _harmless("the figures on /metrics are not up to date"):
                self._update_metrics()

    def _update_metrics(self) -> None:
        records, self._cursor = self.ring.since(self._cursor)
        if not len(records):
            return
        from vllm.v1.readiness import probe_metrics

        with self._writing:
            if self._metrics is None:
                self._metrics = probe_metrics.Histograms(KINDS)
            self._metrics.update(records, list(self.names))
            self._metrics.write(f"{self.path}.{self.label()}.metrics")

    def _header(self, label: str) -> dict[str, object]:
        from vllm.v1.readiness import probe_metrics

        torch = sys.modules.get("torch")
        vllm = sys.modules["vllm"]
        digest = identity.digest()
        return {
            "label": label,
            "pid": os.getpid(),
            "boot": probe_metrics.boot(),
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
            "written_ns": _now(),
        }


def _device() -> str:
    torch = sys.modules.get("torch")
    # A name is not worth a context on a device that this process does not use.
    if torch is None or not torch.cuda.is_initialized():
        return "CPU"
    return str(torch.cuda.get_device_name())


def _remove(path: str) -> None:
    """Remove this process's file, unless there is another process's of that name by now."""
    with suppress(FileNotFoundError):
        with open(path, "rb") as file:
            mine = json.loads(file.readline())["pid"] == os.getpid()
        if mine:
            os.unlink(path)


@contextmanager
def _harmless(failing: str) -> Iterator[None]:
    """Have what goes wrong within be logged once, and end neither a thread nor an engine."""
    try:
        yield
    except Exception as error:
        _tell(f"{failing}: {type(error).__name__}: {error}")


_recorder: Recorder | None = None
_making = threading.Lock()
_path: str | None = None
#: When this process began, as far as the probe knows: of Unix time, and on the records' clock.
_begun = (time.time_ns(), _now())


def recorder() -> Recorder:
    """This process's recorder; made when there is something to record."""
    global _recorder  # noqa: PLW0603
    if _recorder is None:
        with _making:
            if _recorder is None:
                assert _path is not None
                made = Recorder(_path)
                made.run()
                _recorder = made
    return _recorder


def _fence(name: str, began: int, ended: int) -> None:
    """Somebody has waited; an engine that starts does so for nobody's step."""
    if _recorder is not None and _recorder.known():
        _recorder.fence(name, began, ended)


def listen() -> None:
    """Have SIGUSR2 write this process's file, or do nothing where there is none.

    Without it the signal ends a process, and it is not every process of a server that records.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(SIGNAL) in (signal.SIG_DFL, _signalled):
        signal.signal(SIGNAL, _signalled)
    else:
        _tell("SIGUSR2 is taken; files are written at exit alone")


def _signalled(*_: object) -> None:
    if _recorder is not None:
        _recorder.wake()


def _forked() -> None:
    """A child records for itself, if it has anything to record."""
    global _recorder, _making, _begun  # noqa: PLW0603
    _recorder, _making = None, threading.Lock()
    _begun = (time.time_ns(), _now())


def install() -> None:
    """Watch this process, if VLLM_READINESS_PROBE says so; else touch nothing.

    May be called again, and before or after what it watches has been imported.

    Raises:
        PathError: the variable's directory is not there, or not writable.
    """
    global _path, _begun  # noqa: PLW0603
    path = switch.probe()
    if path is None:
        return
    listen()
    if _path is not None:
        return
    _path = os.path.abspath(path)
    _begun = (time.time_ns(), _now())
    os.register_at_fork(after_in_child=_forked)
    fences.listeners.append(_fence)
    _watch_events()
    for module, watch in _WATCHED.items():
        _when_imported(module, watch)
    logger.info("Readiness probe on: records go to %s.*", switch.shown(_path))


def _watch_runner(module: ModuleType) -> None:
    runner = module.GPUModelRunner
    _replace(runner, "execute_model", _execute_model)
    _replace(runner, "sample_tokens", _sample_tokens)
    for name, make in (("_to_list", _to_list), ("_sync_device", _sync_device)):
        if hasattr(runner, name):
            _replace(runner, name, make)
    if hasattr(module, "AsyncGPUModelRunnerOutput"):
        _watch_output(module.AsyncGPUModelRunnerOutput, _plain)


def _watch_output_of_v2(module: ModuleType) -> None:
    import torch

    _watch_output(module.AsyncOutput, torch.cuda.Event)


def _watch_output(output: type, event_type: Callable[..., Any]) -> None:
    """Watch what a step hands out later.

    Args:
        output: its class.
        event_type: the class of its event.
    """
    _replace(output, "__init__", partial(_started, event_type=event_type))
    _replace(output, "get_output", _get_output)


def _watch_scheduler(module: ModuleType) -> None:
    _replace(module.Scheduler, "schedule", _schedule)
    _replace(module.Scheduler, "update_from_output", _update_from_output)


def _watch_core(module: ModuleType) -> None:
    _replace(module.EngineCore, "shutdown", _shutdown)


def _watch_outputs(module: ModuleType) -> None:
    """The overlay's own: what it does where upstream calls ``_to_list``."""
    _replace(module.Outputs, "show", _to_list)


_WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.worker.gpu_model_runner": _watch_runner,
    "vllm.v1.worker.gpu.model_runner": _watch_runner,
    "vllm.v1.worker.gpu.async_utils": _watch_output_of_v2,
    "vllm.v1.core.sched.scheduler": _watch_scheduler,
    "vllm.v1.engine.core": _watch_core,
    "vllm.v1.readiness.outputs": _watch_outputs,
}


def _replace(owner: type, name: str, make: Callable[[Function], Function]) -> None:
    """Replace a method by what ``make`` makes of it, unless that has been done."""
    original = getattr(owner, name)
    if not hasattr(original, "_probed"):
        made = wraps(original)(make(original))
        made._probed = True  # type: ignore[attr-defined]
        setattr(owner, name, made)


def _execute_model(original: Function) -> Function:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # Runner V2 profiles and warms up by steps; and a step may only clear requests away.
        _here.idle = (
            not scheduler_output.total_num_scheduled_tokens
            or bool(kwargs.get("dummy_run"))
            or next(iter(scheduler_output.num_scheduled_tokens)).startswith(_WARM_UP)
        )
        if _here.idle:
            return original(self, scheduler_output, *args, **kwargs)
        mine = recorder()
        continuing = len(scheduler_output.scheduled_cached_reqs.req_ids)
        began = _now()
        step = mine.begin(self.vllm_config, continuing)
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            mine.ring.put(EXECUTE, began, _now(), step, continuing, threading.get_ident())

    return execute_model


def _sample_tokens(original: Function) -> Function:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _here.idle:
            return original(self, *args, **kwargs)
        mine = recorder()
        began = _now()
        result = None
        try:
            result = original(self, *args, **kwargs)
            return result
        finally:
            ended = _now()
            mine.ring.put(SAMPLE, began, ended, mine.step, 0, threading.get_ident())
            if result is not None and not hasattr(result, "get_output"):
                mine.handed_out(ended, mine.step, mine.continuing)

    return sample_tokens


def _started(original: Function, event_type: Callable[..., Any]) -> Function:
    """An asynchronous output starts its copies when it is made."""

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        if _here.idle:
            original(self, *args, **kwargs)
            return
        mine = recorder()
        started = _mark(event_type)
        launched = _now()
        _here.timing = True
        try:
            original(self, *args, **kwargs)
        finally:
            _here.timing = False
        self._probe = mine.step, mine.continuing, started, launched

    return start


def _get_output(original: Function) -> Function:
    def get_output(self: Any) -> Any:
        step, continuing, started, launched = getattr(self, "_probe", (0, 0, None, 0))
        if not step:  # made before the probe was there
            return original(self)
        mine = recorder()
        _here.step, _here.event = step, None
        began = _now()
        try:
            return original(self)
        finally:
            ended = _now()
            _here.step = 0
            mine.ring.put(GET_OUTPUT, began, ended, step, 0, threading.get_ident())
            _read(mine, started, launched, step)
            mine.handed_out(ended, step, continuing)

    return get_output


def _to_list(original: Function) -> Function:
    """Under synchronous scheduling, what is sampled is copied and waited for in one go."""

    def to_list(self: Any, sampled: Any) -> Any:
        # The overlay's runner asks for a list of what it has been shown, too.
        started = None if getattr(sampled, "is_cpu", False) else _mark(_plain)
        if started is None:
            return original(self, sampled)
        launched = _now()
        _here.event, _here.timing = None, True
        try:
            if getattr(self, "transfer_event", None) is not getattr(self, "_probe_event", None):
                # Upstream's runner keeps one event, which was made to tell no time.
                self.transfer_event = self._probe_event = sys.modules["torch"].Event()
            return original(self, sampled)
        finally:
            _here.timing = False
            mine = recorder()
            _read(mine, started, launched, mine.step)

    return to_list


def _sync_device(original: Function) -> Function:
    def sync_device(*args: Any, **kwargs: Any) -> Any:
        began = _now()
        try:
            return original(*args, **kwargs)
        finally:
            _fence("_sync_device", began, _now())

    return sync_device


def _schedule(original: Function) -> Function:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        mine = recorder()
        mine.schedules(self.vllm_config)
        began = _now()
        try:
            return original(self, *args, **kwargs)
        finally:
            mine.ring.put(SCHEDULE, began, _now(), mine.step, 0, threading.get_ident())

    return schedule


def _update_from_output(original: Function) -> Function:
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        mine = recorder()
        began = _now()
        try:
            return original(self, *args, **kwargs)
        finally:
            mine.ring.put(UPDATE, began, _now(), mine.step, 0, threading.get_ident())

    return update_from_output


def _shutdown(original: Function) -> Function:
    """An engine's core waits for its workers, and may be killed before they have ended."""

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        if _recorder is not None:
            _recorder.write()
        return original(*args, **kwargs)

    return shutdown


def _read(mine: Recorder, started: Any, launched: int, step: int) -> None:
    """Record a readback, of which this thread has just seen the event complete."""
    ready, seen = _here.event, _here.seen
    if started is None or ready is None:
        return
    try:
        began, ended = mine.clock.times(started, ready, launched, seen, _here.waited)
    except RuntimeError as error:
        _tell(f"events tell no time, and readbacks are left out: {error}")
        return
    mine.ring.put(READBACK, began, ended, step, 0, seen)


@lru_cache
def _tell(sentence: str) -> None:
    """Log something once."""
    logger.warning("%s: %s", switch.PROBE, sentence)


@lru_cache
def _has_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _mark(event_type: Callable[..., Any]) -> Any:
    """An event with timing in the current stream; None where there is no such thing."""
    if not _has_device():
        return None
    event = event_type(enable_timing=True)
    event.record()
    return event


#: Marks a class whose attributes can be set (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9
#: ``torch.Event`` as torch has it.
_plain: Callable[..., Any]


def _watch_events() -> None:
    """Have events say who waits for them, and tell the time where they are asked to."""
    global _plain  # noqa: PLW0603
    import torch

    _plain = torch.Event
    if not isinstance(_plain, type) or not hasattr(_plain, "synchronize"):
        return  # while vLLM's CPU runner is being built, and there are no events
    plain: Any = _plain
    made = plain.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs.get("enable_timing"):
            # Whose owner asks for the time, and torch takes only its own type for that.
            return plain(*args, **kwargs)
        return made(cls, **_timed(kwargs))

    # A C type, whose attributes are fixed: a subclass takes its name.
    watched = {
        "__new__": new,
        "query": _query(plain.query),
        "synchronize": _synchronize(plain.synchronize),
    }
    torch.Event = _Lookalike("Event", (plain,), watched)
    event: Any = torch.cuda.Event
    if not event.__flags__ & _HEAP_TYPE:
        return  # XPU has put the C type there
    make = event.__new__

    def new_on_cuda(cls: type, *args: Any, **kwargs: Any) -> Any:
        return make(cls, *args, **(kwargs if args else _timed(kwargs)))

    event.__new__ = new_on_cuda
    event.query = _query(event.query)
    event.synchronize = _synchronize(event.synchronize)


class _Lookalike(type):
    """Makes a class that all of its base's instances and subclasses are taken for."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__ or object)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__base__ or object)


def _timed(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "enable_timing": True} if _here.timing else kwargs


def _query(original: Function) -> Function:
    @wraps(original)
    def query(event: Any) -> Any:
        completed = original(event)
        if completed:
            _here.event, _here.seen, _here.waited = event, _now(), False
        return completed

    return query


def _synchronize(original: Function) -> Function:
    @wraps(original)
    def synchronize(event: Any) -> None:
        if event.query():
            original(event)
            return
        began = _now()
        original(event)
        ended = _now()
        _here.event, _here.seen, _here.waited = event, ended, True
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__") != fences.__name__:  # that one tells us itself
            _fence(caller.f_code.co_name, began, ended)

    return synchronize


class _Importing(importlib.abc.MetaPathFinder):
    """Calls somebody when a module has been imported."""

    def __init__(self) -> None:
        self.awaited: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that tells when it is done."""
        watch = self.awaited.pop(fullname, None)
        if watch is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_importing = _Importing()


def _when_imported(name: str, watch: Callable[[ModuleType], None]) -> None:
    """Call ``watch`` with a module now if it is there, or else when it is imported."""
    if (module := sys.modules.get(name)) is not None:
        watch(module)
        return
    if _importing not in sys.meta_path:
        sys.meta_path.insert(0, _importing)
    _importing.awaited[name] = watch
