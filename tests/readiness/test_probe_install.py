"""Which classes and modules the probe observes, and from when on."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.v1.core.sched import scheduler
from vllm.v1.readiness.engine import fences, switch
from vllm.v1.readiness.watch import probe, wrapping
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import async_utils


def test_without_the_variable_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: list[Any] = [gpu_model_runner, async_utils, scheduler]
    classes = [v for m in modules for v in vars(m).values() if isinstance(v, type)]

    def state() -> list[Any]:
        replaceable = (torch.Event, torch.cuda.Event.synchronize, *sys.meta_path)
        return [
            [dict(vars(each)) for each in classes],
            [*map(id, replaceable)],
        ]

    monkeypatch.delenv(switch.PROBE, raising=False)
    before = state()
    probe.install()
    assert fences.listeners == []
    assert state() == before


def test_modules_imported_before_and_after_are_watched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("before", "after", "never"):
        (tmp_path / f"watched_{name}.py").write_text(f"VALUE = {name!r}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(wrapping, "_hook", wrapping.ImportHook())
    watched: list[str] = []

    def watch(module: ModuleType) -> None:
        watched.append(module.VALUE)

    __import__("watched_before")
    for name in ("watched_before", "watched_after", "watched_missing"):
        wrapping.when_imported(name, watch)
    assert watched == ["before"]
    __import__("watched_after")
    __import__("watched_after")
    __import__("watched_never")
    assert watched == ["before", "after"]
    with pytest.raises(ModuleNotFoundError):
        __import__("watched_missing")
    assert sys.modules["watched_after"].__spec__ is not None
    for name in ("before", "after", "never"):
        del sys.modules[f"watched_{name}"]
