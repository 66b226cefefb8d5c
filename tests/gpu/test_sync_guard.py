"""The sync guard under torch's real sync debug mode, and the waits that the mode misses."""

import logging
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu.waits import warn_of_missed
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.watch import sync_guard

pytestmark = pytest.mark.gpu

#: Some 50 ms.
CYCLES = 100_000_000


class Runner:
    """A model runner, as far as the guard knows it; a step calls its argument."""

    def execute_model(self, work: Callable[[], Any]) -> Any:
        return work()

    def sample_tokens(self, work: Callable[[], Any]) -> Any:
        return work()


class Log(logging.Handler):
    """The guard's reports."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for the device" in record.getMessage():
            self.reports.append(record.getMessage())


class Operands:
    """Operands, allocated before a step."""

    def __init__(self) -> None:
        self.device = torch.arange(24, dtype=torch.float32, device="cuda").view(4, 6)
        self.columns = self.device.t()
        self.scalar = torch.ones((), device="cuda")
        self.counts = torch.ones(6, dtype=torch.int64, device="cuda")
        self.mask = self.device > 7
        self.pageable = torch.zeros(4, 6)
        self.pinned = torch.zeros(4, 6, pin_memory=True)
        self.converted = torch.zeros(4, 6, dtype=torch.float64, pin_memory=True)
        self.like_columns = torch.zeros(4, 6, pin_memory=True).t()
        self.part = torch.zeros(4, 9, pin_memory=True)[:, :6]
        self.rows = torch.zeros(9, 6, pin_memory=True)[2:6]
        self.event = torch.cuda.Event()


Operation = Callable[[Operands], object]

#: torch's sync debug mode reports these.
FLAGGED: dict[str, Operation] = {
    "item": lambda o: o.scalar.item(),
    "cpu": lambda o: o.device.cpu(),
    "tolist": lambda o: o.device.tolist(),
    "to, blocking": lambda o: o.device.to("cpu"),
    "boolean mask": lambda o: o.device[o.mask],
    "tensor from a list": lambda o: torch.tensor([1, 2, 3], device="cuda"),
    "pageable to the device": lambda o: o.device.copy_(o.pageable),
    "repeat_interleave": lambda o: o.device.repeat_interleave(o.counts, dim=1),
    "a stream": lambda o: torch.cuda.current_stream().synchronize(),
}
#: torch's mode misses these; :func:`warn_of_missed` warns of them.
BLIND: dict[str, Operation] = {
    "torch.cuda.synchronize": lambda o: torch.cuda.synchronize(),
    "torch.accelerator.synchronize": lambda o: torch.accelerator.synchronize(),
}
#: Non-blocking copies to the host that block nevertheless.
BLOCKING: dict[str, Operation] = {
    "into pageable memory": lambda o: o.pageable.copy_(o.device, non_blocking=True),
    "into part of each pinned row": lambda o: o.part.copy_(o.device, non_blocking=True),
    "cast of columns": lambda o: o.columns.to("cpu", torch.float64, non_blocking=True),
}
#: Non-blocking copies that do not block.
FREE: dict[str, Operation] = {
    "into pinned memory": lambda o: o.pinned.copy_(o.device, non_blocking=True),
    "into pinned rows": lambda o: o.rows.copy_(o.device, non_blocking=True),
    "converted": lambda o: o.converted.copy_(o.device, non_blocking=True),
    "columns into columns": lambda o: o.like_columns.copy_(o.columns, non_blocking=True),
    "to": lambda o: o.device.to("cpu", non_blocking=True),
    "to, columns": lambda o: o.columns.to("cpu", non_blocking=True),
    "to, converted": lambda o: o.device.to("cpu", torch.float64, non_blocking=True),
}


def recorded_and_awaited(o: Operands) -> None:
    o.event.record()
    o.event.synchronize()


#: Operations that are not reported.
QUIET: dict[str, Operation] = {
    **FREE,
    "kernels": lambda o: (o.device @ o.columns).sin().softmax(-1),
    "from pinned memory": lambda o: o.device.copy_(o.pinned, non_blocking=True),
    "an event": recorded_and_awaited,
}
REPORTED = FLAGGED | BLIND | BLOCKING


@pytest.fixture
def operands() -> Iterator[Operands]:
    yield Operands()
    torch.cuda.synchronize()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """The guard's reports of this test; torch's functions are restored afterwards."""
    handler = Log()
    monkeypatch.setattr(sync_guard.logger, "handlers", [handler])
    monkeypatch.setattr(sync_guard.logger, "isEnabledFor", lambda level: True)
    monkeypatch.setattr(sync_guard, "_reported", set())
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    warn_of_missed(monkeypatch.setattr)
    with warnings.catch_warnings():
        yield handler
    torch.cuda.set_sync_debug_mode("default")


def guarded(monkeypatch: pytest.MonkeyPatch, word: str) -> Runner:
    monkeypatch.setenv(switch.SYNC_GUARD, word)
    runner = Runner()
    sync_guard.install(runner)
    return runner


def warmed_up(operation: Operation, operands: Operands) -> None:
    """Run an operation once: the first use of a kernel, or of pinned memory, can block."""
    operation(operands)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", REPORTED)
def test_a_wait_is_raised_with_its_stack(
    name: str, operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted() -> None:
        REPORTED[name](operands)

    warmed_up(REPORTED[name], operands)
    runner = guarded(monkeypatch, "error")
    with pytest.raises(RuntimeError, match=r"^sample_tokens waits for the device") as caught:
        runner.sample_tokens(planted)
    assert "in planted" in str(caught.value)
    planted()
    assert log.reports == []


def test_a_wait_is_logged_once(
    operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "warn")
    for _ in range(3):
        runner.execute_model(operands.scalar.item)
    (report,) = log.reports
    assert report.startswith("execute_model waits for the device")


@pytest.mark.parametrize("name", QUIET)
def test_other_operations_are_not_reported(
    name: str, operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed_up(QUIET[name], operands)
    guarded(monkeypatch, "error").sample_tokens(lambda: QUIET[name](operands))


@pytest.mark.parametrize("name", BLOCKING | FREE)
def test_a_non_blocking_copy_is_reported_if_it_blocks(
    name: str, operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the oracle: if it still sleeps when the copy returns, the copy is free."""
    operation = (BLOCKING | FREE)[name]
    runner = guarded(monkeypatch, "warn")

    def step() -> bool:
        torch.cuda._sleep(CYCLES)
        operands.event.record()
        kept = operation(operands)
        blocked = bool(operands.event.query())
        del kept
        return blocked

    for _ in range(2):
        warmed_up(lambda o: step(), operands)
    blocked = runner.sample_tokens(step)
    assert (len(log.reports) == 1) is blocked
    assert blocked is (name in BLOCKING)


def test_a_wait_of_another_thread_is_not_reported(
    operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "error")
    with ThreadPoolExecutor(1) as pool:
        assert runner.sample_tokens(lambda: pool.submit(operands.scalar.item).result(60)) == 1.0
    assert log.reports == []


def test_torchs_warning_about_the_mode_is_not_shown(
    operands: Operands, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch warns once a process that the mode is a prototype; here, each time."""
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        guarded(monkeypatch, "warn").sample_tokens(operands.scalar.item)
    finally:
        torch.set_warn_always(always)
    assert shown == []
    assert len(log.reports) == 1


@pytest.mark.parametrize("word", ["warn", "error"])
def test_compiling_within_a_step_is_not_reported(
    word: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With cold caches, so that everything is compiled and tuned."""
    runner = guarded(monkeypatch, word)
    torch._dynamo.reset()
    monkeypatch.setattr("torch._inductor.config.force_disable_caches", True)
    values = torch.rand((5, 300), device="cuda")

    @torch.compile  # type: ignore[untyped-decorator]
    def count(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor >= tensor.mean()).sum(-1)

    runner.sample_tokens(lambda: count(values))
    assert log.reports == []
    if word == "error":
        with pytest.raises(RuntimeError, match="waits for the device"):
            runner.sample_tokens(lambda: count(values).tolist())
