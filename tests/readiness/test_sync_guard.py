"""The sync guard, without a GPU.

Where there is no CUDA, torch has no sync debug mode and flags nothing. ``Cuda`` stands in
for the mode and for an operation that it flags; tensors that say ``is_cuda`` stand in for
the device's. ``tests/gpu/test_sync_guard.py`` has the real ones.
"""

import logging
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.logger
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.readiness import startup, switch, sync_guard
from vllm.v1.readiness.sync_guard import FUNCTIONS, DeviceSyncError

DEFAULT, WARN, ERROR = range(3)
WATCHED = [
    (torch.cuda, "synchronize"),
    (torch.accelerator, "synchronize"),
    (torch.Tensor, "copy_"),
    (torch.Tensor, "to"),
]


class Runner:
    """Nothing but what a guard asks for; a step does the work that it is given."""

    def execute_model(self, work: Callable[[], Any], dummy_run: bool = False) -> Any:
        return work()

    def sample_tokens(self, work: Callable[[], Any]) -> Any:
        return work()


class Cuda:
    """The mode of ``torch.cuda``, and how torch speaks of it."""

    def __init__(self) -> None:
        self.mode = DEFAULT

    def set(self, mode: str | int) -> None:
        warnings.warn("Synchronization debug mode is a prototype feature and ...", stacklevel=2)
        self.mode = mode if isinstance(mode, int) else ("default", "warn", "error").index(mode)

    def get(self) -> int:
        return self.mode

    def item(self) -> int:
        """A wait that torch's mode flags."""
        flagged = "called a synchronizing CUDA operation (Triggered internally at CUDA.cpp:1.)"
        if self.mode == WARN:
            warnings.warn(flagged, stacklevel=2)
        elif self.mode == ERROR:
            raise RuntimeError(flagged)
        return 7


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """Says that it is on the device."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class Pageable(torch.Tensor):  # type: ignore[misc]
    """Is not pinned; any other tensor here says that it is."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Log(logging.Handler):
    """What the guard logs."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """All of it, and nothing left out because another test has logged it."""
    handler = Log()
    monkeypatch.setattr(sync_guard.logger, "handlers", [handler])
    monkeypatch.setattr(sync_guard.logger, "propagate", False)
    monkeypatch.setattr(sync_guard.logger, "isEnabledFor", lambda level: True)
    vllm.logger._print_info_once.cache_clear()
    vllm.logger._print_warning_once.cache_clear()
    return handler


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, log: Log) -> Cuda:
    """A machine that seems to have CUDA; whatever is replaced is put back."""
    device = Cuda()
    monkeypatch.setattr(sync_guard, "current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", device.set)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", device.get)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: ("waited", device))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: ("waited", device))
    monkeypatch.setattr(torch.Tensor, "copy_", torch.Tensor.copy_)
    monkeypatch.setattr(torch.Tensor, "to", torch.Tensor.to)
    monkeypatch.setattr(sync_guard, "_reported", set())
    return device


def guarded(monkeypatch: pytest.MonkeyPatch, word: str) -> Runner:
    monkeypatch.setenv(switch.SYNC_GUARD, word)
    runner = Runner()
    sync_guard.install(runner)
    return runner


def reports(log: Log) -> list[str]:
    return [r.getMessage() for r in log.records if "waits for the device" in r.getMessage()]


# The variable.


@given(
    st.sampled_from(["", "off", "warn", "error", " warn "])
    | st.text(st.characters(exclude_characters="\0", codec="utf-8"))
)
def test_any_word_but_the_valid_ones_is_refused(value: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_READINESS_SYNC_GUARD", value)
        word = value.strip() or "off"
        if word in ("off", "warn", "error"):
            assert switch.sync_guard() == switch.VARIABLES[switch.SYNC_GUARD]() == word
            return
        with pytest.raises(switch.SwitchError, match=r"Valid: off, warn, error\.") as caught:
            switch.sync_guard()
        assert f"{word!r} is not understood" in str(caught.value)
        assert "VLLM_READINESS_SYNC_GUARD=" in str(caught.value)


def test_an_engine_with_a_misspelt_word_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not there is anything to guard."""
    monkeypatch.setenv(switch.SYNC_GUARD, "warning")
    with pytest.raises(switch.SwitchError, match="'warning' is not understood"):
        startup.start(Runner())


# What is installed.


@pytest.mark.parametrize("value", ["", "off"])
@pytest.mark.usefixtures("cuda")
def test_nothing_is_installed_when_it_is_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [getattr(owner, name) for owner, name in WATCHED]
    shown, filters = warnings.showwarning, list(warnings.filters)
    runner = guarded(monkeypatch, value)
    assert vars(runner) == {}
    assert [getattr(owner, name) for owner, name in WATCHED] == before
    assert warnings.showwarning is shown
    assert warnings.filters == filters


@pytest.mark.parametrize(("platform", "available"), [(False, True), (True, False)])
def test_without_cuda_it_says_once_that_there_is_nothing_to_guard(
    platform: bool,
    available: bool,
    cuda: Cuda,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = SimpleNamespace(is_cuda_alike=lambda: platform)
    monkeypatch.setattr(sync_guard, "current_platform", there)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    before = [getattr(owner, name) for owner, name in WATCHED]
    for _ in range(2):
        assert vars(guarded(monkeypatch, "error")) == {}
    assert [getattr(owner, name) for owner, name in WATCHED] == before
    assert [(r.levelname, "nothing to guard" in r.getMessage()) for r in log.records] == [
        ("WARNING", True)
    ]


def test_starting_an_engine_guards_its_runner_and_says_so(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.SYNC_GUARD, "error")
    runner = Runner()
    startup.start(runner)
    assert runner.sample_tokens(cuda.get) == ERROR
    said = [record.getMessage() for record in log.records]
    assert [line for line in said if "Sync guard on (VLLM_READINESS_SYNC_GUARD=error)" in line]


def test_functions_are_wrapped_once_whatever_is_guarded_twice(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another runner, or the same one by the overlay and by a plugin."""
    runner = guarded(monkeypatch, "warn")
    once = [getattr(owner, name) for owner, name in WATCHED]
    shown = warnings.showwarning
    guarded(monkeypatch, "error")
    assert [getattr(owner, name) for owner, name in WATCHED] == once
    assert warnings.showwarning is shown
    sync_guard.install(runner)
    assert runner.sample_tokens(cuda.item) == 7
    assert len(reports(log)) == 1
    assert cuda.mode == DEFAULT


# The mode.


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("word", "mode"), [("warn", WARN), ("error", ERROR)])
@pytest.mark.parametrize("before", [DEFAULT, WARN, ERROR])
def test_a_step_runs_under_the_mode_and_leaves_the_one_before(
    function: str, word: str, mode: int, before: int, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = getattr(guarded(monkeypatch, word), function)
    cuda.mode = before
    assert step(cuda.get) == mode
    assert cuda.mode == before
    with pytest.raises(ZeroDivisionError):
        step(lambda: 1 // 0)
    assert cuda.mode == before


def test_a_step_inside_a_step_leaves_the_outer_one_guarded(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "error")

    def outer() -> None:
        with pytest.raises(DeviceSyncError) as inner:
            runner.sample_tokens(cuda.item)
        assert inner.value.function == "sample_tokens"
        assert cuda.mode == ERROR
        with pytest.raises(DeviceSyncError, match=r"^execute_model .* torch.cuda.synchronize"):
            torch.cuda.synchronize()
        cuda.item()

    with pytest.raises(DeviceSyncError) as caught:
        runner.execute_model(outer)
    assert caught.value.function == "execute_model"
    assert cuda.mode == DEFAULT
    assert torch.cuda.synchronize() == ("waited", None)


# What a step says of a wait.


def test_an_error_names_the_function_and_what_to_do_next(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "error")

    def planted() -> None:
        cuda.item()

    with pytest.raises(RuntimeError, match=r"^sample_tokens waits for the device") as caught:
        runner.sample_tokens(planted)
    assert "VLLM_READINESS_SYNC_GUARD=warn lists every such place; unset it" in str(caught.value)
    assert type(caught.value.__cause__) is RuntimeError
    assert "in planted" in "".join(traceback.format_exception(caught.value))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a request")])
def test_other_errors_are_left_alone(
    error: Exception, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        guarded(monkeypatch, "error").execute_model(fail)
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_a_warning_is_logged_with_the_stack_of_the_step(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted() -> int:
        return cuda.item()

    assert guarded(monkeypatch, "warn").sample_tokens(planted) == 7
    (report,) = reports(log)
    first, *frames = report.splitlines()
    assert first.startswith("sample_tokens waits for the device: it called a synchronizing")
    assert "in sample_tokens" in frames[0]
    assert any("in planted" in frame for frame in frames)
    assert "return cuda.item()" in report
    assert sync_guard.__file__ not in report
    assert "test_a_warning_is_logged" not in report


def test_each_stack_is_logged_once(cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of different functions, lines, or ways to one line."""
    runner = guarded(monkeypatch, "warn")

    def here() -> None:
        cuda.item()

    def there() -> None:
        cuda.item()

    def detour() -> None:
        here()

    for _ in range(3):
        for count, (step, work) in enumerate(
            [
                (runner.sample_tokens, here),
                (runner.sample_tokens, there),
                (runner.execute_model, here),
                (runner.execute_model, detour),
            ],
            1,
        ):
            step(work)
            assert len(reports(log)) >= count
    assert len(reports(log)) == 4


def test_other_warnings_are_shown_as_before(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, type[Warning]]] = []
    monkeypatch.setattr(
        warnings,
        "showwarning",
        lambda message, category, *_: shown.append((str(message), category)),
    )

    def step() -> None:
        warnings.warn("something else", DeprecationWarning, stacklevel=1)
        cuda.item()

    warnings.simplefilter("always")
    guarded(monkeypatch, "warn").sample_tokens(step)
    # Not torch's on the mode itself, which the stand-in gives each time that it is set.
    assert shown == [("something else", DeprecationWarning)]
    assert len(reports(log)) == 1


def test_a_wait_in_another_thread_is_not_laid_at_the_steps_door(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mode is the process's, so that torch warns in that thread."""
    runner = guarded(monkeypatch, "warn")

    def beside() -> None:
        cuda.item()
        torch.cuda.synchronize()

    def step() -> None:
        other = threading.Thread(target=beside, name="connector")
        other.start()
        other.join()

    runner.sample_tokens(step)
    (report,) = reports(log)
    assert report.startswith("Thread connector, outside of a step, waits for the device: it called")
    assert "in _bootstrap\n" in report
    assert "in beside\n" in report


# What torch's mode misses.


@pytest.mark.parametrize("owner", [torch.cuda, torch.accelerator], ids=["cuda", "accelerator"])
def test_waiting_for_a_whole_device_is_reported_inside_a_step_only(
    owner: Any, cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "warn")

    def planted() -> Any:
        return owner.synchronize(3)

    assert planted() == ("waited", 3)
    assert reports(log) == []
    assert runner.execute_model(planted) == ("waited", 3)
    (report,) = reports(log)
    assert report.startswith(f"execute_model waits for the device: {owner.__name__}.synchronize\n")
    assert "in planted" in report
    strict = guarded(monkeypatch, "error")
    with pytest.raises(DeviceSyncError, match=rf"{owner.__name__}\.synchronize"):
        strict.execute_model(planted)
    assert planted() == ("waited", 3)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def pageable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(Pageable)


ROW, ROWS, COLUMNS = torch.ones(3), torch.ones(2, 3), torch.ones(3, 2).t()

#: Destination and source of a non-blocking ``copy_``, and whether it blocks.
COPIES = {
    "into pageable memory": (pageable(torch.zeros(3)), ROW, True),
    "into part of each pinned row": (torch.zeros(2, 5)[:, :3], ROWS, True),
    "part of each row into the like": (torch.zeros(2, 5)[:, :3], torch.ones(2, 5)[:, :3], True),
    "rows into columns": (torch.zeros(3, 2).t(), ROWS, True),
    "one row into columns": (torch.zeros(3, 2).t(), ROW, True),
    "columns into columns, converted": (torch.zeros(3, 2).t(), COLUMNS.double(), True),
    "into pinned memory": (torch.zeros(3), ROW, False),
    "into pinned rows": (torch.zeros(4, 3)[1:3], ROWS, False),
    "columns into pinned rows, converted": (torch.zeros(2, 3), COLUMNS.double(), False),
    "columns into columns": (torch.zeros(3, 2).t(), COLUMNS, False),
    "nothing": (pageable(torch.zeros(0)), torch.ones(0), False),
}

#: Source and arguments of ``to``, and whether it blocks though non-blocking.
CASTS = {
    "columns, converted": (COLUMNS, {"dtype": torch.float64, "non_blocking": True}, True),
    "columns": (COLUMNS, {"non_blocking": True}, False),
    "rows, converted": (ROWS, {"dtype": torch.float64, "non_blocking": True}, False),
    "columns, blocking": (COLUMNS, {"dtype": torch.float64}, False),
}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that seems pinned, unless it is said to be pageable."""
    is_pinned = lambda tensor: not isinstance(tensor, Pageable)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_pinned)


def reported_if(
    blocks: bool, copy: Callable[[], Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "warn")
    expected = copy()
    assert reports(log) == []
    assert torch.equal(runner.sample_tokens(copy), expected)
    assert ["though non_blocking" in report for report in reports(log)] == [True] * blocks
    strict = guarded(monkeypatch, "error")
    if blocks:
        with pytest.raises(DeviceSyncError, match="though non_blocking"):
            strict.sample_tokens(copy)
    else:
        strict.sample_tokens(copy)


@pytest.mark.usefixtures("cuda", "host")
@pytest.mark.parametrize("name", [*COPIES, *CASTS])
def test_a_copy_to_the_host_that_blocks_is_reported_inside_a_step_only(
    name: str, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in COPIES:
        destination, source, blocks = COPIES[name]
        source = on_device(source)
        copy = lambda: destination.copy_(source, non_blocking=True)  # noqa: E731
    else:
        source, how, blocks = CASTS[name]
        source = on_device(source)
        copy = lambda: source.to("cpu", **how)  # noqa: E731
    reported_if(blocks, copy, log, monkeypatch)


@pytest.mark.usefixtures("cuda", "host")
@pytest.mark.parametrize(
    "copy",
    [
        lambda host, device: host.copy_(device, True),
        lambda host, device: host.copy_(other=device, non_blocking=True),
        lambda host, device: device.t().as_subclass(OnDevice).to("cpu", torch.float64, True),
    ],
)
def test_a_copy_is_recognised_however_its_arguments_are_given(
    copy: Callable[..., Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = pageable(torch.zeros(2, 3)), on_device(ROWS)
    reported_if(True, lambda: copy(host, device), log, monkeypatch)


@pytest.mark.usefixtures("cuda", "host")
@pytest.mark.parametrize(
    "copy",
    [
        lambda host, device: host.copy_(device),
        lambda host, device: host.copy_(pageable(torch.ones(2, 3)), non_blocking=True),
        lambda host, device: device.copy_(host, non_blocking=True),
        lambda host, device: on_device(device.t()).copy_(on_device(ROW[:2]), non_blocking=True),
        lambda host, device: host.copy_(3.0, non_blocking=True),
    ],
    ids=["blocking, which torch's mode sees", "host to host", "to it", "on it", "of a number"],
)
def test_other_copies_are_left_alone(
    copy: Callable[..., Any], log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, device = pageable(torch.zeros(2, 3)), on_device(ROWS.clone())
    # What is on the device is not in the host's memory.
    monkeypatch.setattr(OnDevice, "device", torch.device("cuda"), raising=False)
    reported_if(False, lambda: copy(host, device), log, monkeypatch)


@pytest.mark.usefixtures("cuda")
def test_compiled_code_does_not_see_the_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch.compile would trace the guard, and compile again inside of a step."""
    runner = guarded(monkeypatch, "error")
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([(node.op, node.target) for node in graph.graph.nodes])
        return graph.forward

    def model(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.copy_(x.to(torch.float64), non_blocking=True)
        return out + 1

    # It would look for the device that is not there.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, out = torch.ones(3), torch.zeros(3)
    compiled(x, out)
    assert torch.equal(runner.execute_model(lambda: compiled(x, out)), torch.full((3,), 2.0))
    (graph,) = graphs
    assert [target for op, target in graph if op == "call_method"] == ["to", "copy_"]


# Compilation.


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("word", ["warn", "error"])
def test_what_torch_compile_does_is_left_alone(
    word: str, reset: bool, cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by the real callbacks; nested compilations are one."""
    runner = guarded(monkeypatch, word)
    if reset:  # it drops every callback
        torch._dynamo.reset()
    modes = []

    def compiles() -> None:
        handler = torch._dynamo.callback.callback_handler
        trigger = torch._dynamo.callback.CallbackTrigger.DYNAMO
        with handler.install_callbacks(trigger, "0/0"):
            with handler.install_callbacks(trigger, "1/0"):
                modes.append(cuda.mode)
                cuda.item()
                torch.cuda.synchronize()
            modes.append(cuda.mode)
            cuda.item()
        modes.append(cuda.mode)

    runner.sample_tokens(compiles)
    assert modes == [DEFAULT, DEFAULT, WARN if word == "warn" else ERROR]
    assert reports(log) == []
    compiles()
    assert cuda.mode == DEFAULT


def test_trying_out_a_compiled_kernel_is_left_alone(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = guarded(monkeypatch, "error")
    source = "def trial():\n    torch.cuda.synchronize()\n"
    found: dict[str, Any] = {"torch": torch}
    exec(compile(source, "/site/torch/_inductor/runtime/benchmarking.py", "exec"), found)
    runner.sample_tokens(found["trial"])
    exec(compile(source, "/site/torch/_other/benchmarking.py", "exec"), found)
    with pytest.raises(DeviceSyncError):
        runner.sample_tokens(found["trial"])


def test_the_dummy_steps_of_a_warm_up_are_not_guarded(
    cuda: Cuda, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = guarded(monkeypatch, "error")
    assert runner.execute_model(cuda.item, dummy_run=True) == 7
    with pytest.raises(DeviceSyncError):
        runner.execute_model(cuda.item)
