"""Make ``vllm.v1.readiness`` importable from this checkout, without an installation."""

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Many tests start a program that imports vLLM, which takes three times as long without bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tensors are tiny, and tests and engines run side by side: one thread each, on any core. Torch
# reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
import vllm.v1
from support import thinking

# What `make test` was given is not for the make that a test starts.
for name in ("VENV", "SITE", "PYTHON", "PYTHON3", "ARGS", "MAKEFLAGS", "MAKELEVEL"):
    os.environ.pop(name, None)
# Everything is on, unless a test says otherwise.
os.environ.pop("VLLM_READINESS", None)

vllm.v1.__path__.append(str(Path(__file__).resolve().parents[1] / "vendor_overlay" / "vllm" / "v1"))

if not torch.cuda.is_available():
    thinking.unpin()

# On a busy machine an example's time says little about the code. In CI a test draws the same
# examples each time, so that no commit is refused for what it did not change.
settings.register_profile(
    "busy",
    deadline=None,
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while the tests are imported: nearly all of those objects stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def objects_that_stay_are_not_walked() -> None:
    """Have the collector walk only what is made from here on, not a million objects of imports."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def programs_start_with_no_signal_ignored() -> Iterator[None]:
    """Let programs that tests start react to signals that this process ignores.

    Under nohup, or in the background of a script, signals are ignored, and children inherit
    that. Here a handler ignores them instead, which children do not inherit.
    """
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    ignored = [number for number in numbers if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def any_number_of_requests_is_updated_together() -> None:
    """Have a test of two requests run what serves many."""
    from vllm.v1.readiness.inputs import step_inputs

    step_inputs.ENOUGH = 1


@pytest.fixture(autouse=True)
def the_overlays_variables_are_restored() -> Iterator[None]:
    """Restore the overlay's variables after each test: the engine sets some for its processes."""
    before = {name: os.environ[name] for name in os.environ if name.startswith("VLLM_READINESS")}
    yield
    for name in [name for name in os.environ if name.startswith("VLLM_READINESS")]:
        del os.environ[name]
    os.environ.update(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many lockstep runs were equal, and why others were set aside."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        counts.update(dict(report.user_properties).get("lockstep runs", {}))
    for why, count in counts.most_common():
        terminalreporter.write_line(f"{count:5} lockstep runs: {why}")
