"""Fixtures of several tests: of fixes, logs and the probe."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from readiness.stand_ins import StandIns
from support import modules, probes
from vllm.v1.readiness.engine import fences, gauges, switch
from vllm.v1.readiness.watch import probe
from vllm.v1.readiness.watch.probe import events, metrics, recorder


@pytest.fixture(params=modules.SIDES)
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose code is tested; "off" is ours without the fix that the test's module names ``FIX``."""
    if request.param == "off":
        monkeypatch.setenv(switch.NAME, f"-{request.module.FIX}")
    return str(request.param)


@pytest.fixture
def caplog_vllm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The records of vLLM's loggers, which do not propagate to the root logger."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    return caplog


@pytest.fixture
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], int]:
    """The fallbacks of this test alone."""
    counted: dict[tuple[str, str], int] = {}
    monkeypatch.setattr(gauges, "_fallbacks", counted)
    return counted


@pytest.fixture
def unwritten_memory_shows() -> Iterator[None]:
    """Let torch fill the memory that it allocates."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path that this process records to, without a thread that runs on."""
    file = tmp_path / "file"
    monkeypatch.setattr(recorder, "_path", str(file))
    monkeypatch.setattr(recorder, "_recorder", None)
    monkeypatch.setattr(events, "_torch_event", torch.Event, raising=False)
    monkeypatch.setattr(recorder.Recorder, "start_thread", lambda _: None)
    monkeypatch.setattr(fences, "listeners", [recorder.record_fence])
    recorder.log_once.cache_clear()
    return file


@pytest.fixture
def stand_ins(file: Path) -> StandIns:
    """Upstream's classes, observed; nothing is recorded yet."""
    assert file
    return StandIns()


@pytest.fixture
def warned() -> Iterator[Callable[[], list[str]]]:
    """The warnings that the probe has logged so far."""
    with probes.logged(probe) as sentences:
        yield sentences


@pytest.fixture
def metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The value of VLLM_READINESS_PROBE; nothing has been logged yet."""
    path = tmp_path / "a [probe]*"
    monkeypatch.setenv(switch.PROBE, str(path))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "_warned", set())
    return path
