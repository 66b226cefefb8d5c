"""Fixtures of several tests: of fixes, logs and the probe."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from readiness.stand_ins import StandIns
from support import modules
from vllm.v1.readiness.engine import fences, gauges, switch
from vllm.v1.readiness.watch import exports
from vllm.v1.readiness.watch.probe import histograms, methods


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
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of exports, in which this process has a new file and nothing counted."""
    folder = tmp_path / "exports"
    folder.mkdir()
    monkeypatch.setenv(switch.EXPORTS, str(folder))
    monkeypatch.setenv(switch.PROBE, "1")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(exports, "_exports", exports.Exports())
    monkeypatch.setattr(methods, "state", methods.State())
    monkeypatch.setattr(methods, "this_thread", methods.ThreadState())
    monkeypatch.setattr(fences, "listeners", [methods.record_fence])
    histograms.clear()
    return folder


@pytest.fixture
def stand_ins(exported: Path) -> StandIns:
    """Upstream's classes, observed; nothing is recorded yet."""
    assert exported
    return StandIns()
