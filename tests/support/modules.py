"""Upstream's modules as the overlay changes them, loaded beside upstream's own."""

import atexit
import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from triton.runtime.interpreter import InterpretedFunction

from support.sites import OVERLAY, UPSTREAM

INPUT_BATCH = "vllm/v1/worker/gpu_input_batch.py"
BLOCK_TABLE = "vllm/v1/worker/block_table.py"
RUNNER = "vllm/v1/worker/gpu_model_runner.py"
SAMPLER = "vllm/v1/sample/sampler.py"
REJECTION_SAMPLER = "vllm/v1/sample/rejection_sampler.py"
METADATA = "vllm/v1/sample/metadata.py"
SCHEDULER = "vllm/v1/core/sched/async_scheduler.py"
MRV2_SAMPLER = "vllm/v1/worker/gpu/sample/sampler.py"
#: Whose code a test of a fix runs: upstream's, ours with the fix off, and ours.
SIDES = ("pinned", "off", "ours")


@cache
def _folder() -> Path:
    """Return a directory that ends with this process."""
    folder = tempfile.TemporaryDirectory(prefix="overlaid-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def pristine(path: str) -> Any:
    """Return upstream's module: the oracle."""
    return importlib.import_module(_name(path))


@cache
def overlaid(path: str) -> Any:
    """Return the module with the patches applied, under a name of its own."""
    source = OVERLAY.series.apply(path, (UPSTREAM / path).read_bytes())
    file = _folder() / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(source)
    # In upstream's package, so that its relative imports work.
    package, _, stem = _name(path).rpartition(".")
    layers = path.startswith("vllm/model_executor/")
    if layers:
        pristine(path)  # and what it imports, which registers operators of its own
    with unregistered() if layers else nullcontext():
        module = _load(f"{package}.overlaid_{stem}", file)
    if path == INPUT_BATCH:  # it imports upstream's, which lack our fields
        own: Any = module
        own.SamplingMetadata = overlaid(METADATA).SamplingMetadata
        own.MultiGroupBlockTable = overlaid(BLOCK_TABLE).MultiGroupBlockTable
    return module


@contextmanager
def unregistered() -> Iterator[None]:
    """Keep layers from registering the operators that upstream's layers have registered."""
    from vllm.model_executor import custom_op
    from vllm.utils import torch_utils

    with (
        mock.patch.dict(custom_op.op_registry, clear=True),
        mock.patch.object(torch_utils, "direct_register_custom_op"),
    ):
        yield


def of_side(side: str) -> Any:
    """Return what loads the modules of one of :data:`SIDES`."""
    return pristine if side == "pinned" else overlaid


@contextmanager
def interpreted(name: str) -> Iterator[Any]:
    """A module of ``vllm.v1.readiness.kernels`` under Triton's interpreter.

    It is loaded for the caller alone, with the modules of that package that it imports.
    """
    package = "vllm.v1.readiness.kernels"

    def unload() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if package in name]
        return {name: sys.modules.pop(name) for name in names}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        compiled = unload()
        module = importlib.import_module(f"{package}.{name}")
        unload()
        sys.modules.update(compiled)
        yield module


@contextmanager
def kernels_interpreted(name: str) -> Iterator[Any]:
    """Have Triton's interpreter run the kernels of ``vllm.v1.readiness.sample.{name}``.

    The module takes the kernels of a copy of itself, which is returned.
    """
    path = f"vllm.v1.readiness.sample.{name}"
    module = importlib.import_module(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with (
            imported_anew(path, "vllm.v1.readiness.kernels"),
            pytest.MonkeyPatch.context() as early,
        ):
            early.setitem(sys.modules, "vllm.triton_utils", triton_facade())
            copied = importlib.import_module(path)
        for name, value in vars(copied).items():
            if isinstance(value, InterpretedFunction):
                patch.setattr(module, name, value)
        yield copied


def triton_facade() -> Any:
    """Stand in for vllm.triton_utils where Triton has a driver."""
    triton, language = map(importlib.import_module, ("triton", "triton.language"))
    return SimpleNamespace(HAS_TRITON=True, tl=language, triton=triton)


@contextmanager
def imported_anew(*parts: str) -> Iterator[None]:
    """Forget these modules and all below them, so that imports make new ones, until the end."""

    def anew(name: str) -> bool:
        return not name.startswith("triton._C") and any(
            name == part or name.startswith(f"{part}.") for part in parts
        )

    def attach(name: str, module: ModuleType | None) -> None:
        package, _, stem = name.rpartition(".")
        if module is not None and package:
            setattr(sys.modules[package], stem, module)
        elif package in sys.modules:  # `from package import stem` would find the old one
            vars(sys.modules[package]).pop(stem, None)

    kept = {name: module for name, module in sys.modules.items() if anew(name)}
    for name in kept:
        del sys.modules[name]
        attach(name, None)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if anew(name)]:
            del sys.modules[name]
            attach(name, None)
        sys.modules.update(kept)
        for name, module in kept.items():
            attach(name, module)


@contextmanager
def triton_interpreted(*parts: str) -> Iterator[None]:
    """Import these modules anew with Triton, whose kernels the interpreter runs.

    Triton's own functions (tl.max, tl.rand) are interpreted only if TRITON_INTERPRET is set at
    its import.
    """
    with pytest.MonkeyPatch.context() as patch, imported_anew("triton", *parts):
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, "vllm.triton_utils", triton_facade())
        yield


def _load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")
