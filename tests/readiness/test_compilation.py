"""The kernel of top_k and top_p is compiled in threads, and found by what launches it.

Triton compiles for an H100 here. Without a GPU, a small kernel of the same signature stands in for
upstream's, and nothing is loaded or run; tests/gpu does that.
"""

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support import launches, modules
from triton.runtime import driver

KERNELS = "vllm.v1.sample.ops.topk_topp_triton"
VOCABULARY = 211
SIZES = (9, 16)


def small_kernel(
    logits: tl.tensor,
    stride: tl.tensor,
    buffer: tl.tensor,
    deviations: tl.tensor,
    sigmas: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    TOPP_ENABLED: tl.constexpr,
    TOPK_ENABLED: tl.constexpr,
    BLOCK_SIZE_TRUNC: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    MASK_VALUE: tl.constexpr,
    BATCH_SIZE: tl.tensor,
) -> None:
    tl.store(logits, MASK_VALUE + TOPK_ENABLED + 2 * TOPP_ENABLED, BATCH_SIZE > 0)


class Loaded(launches.Device):
    """A driver that records what a launch would run."""

    def __init__(self) -> None:
        self.launched: list[str] = []
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 1 << 17},
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: self.launched.append(metadata.hash)


class Compiled(SimpleNamespace):
    """A module under test, its device, and the threads and folder of each compilation."""

    module: Any
    device: Loaded
    threads: list[str]
    kernels: Any


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    device, threads = Loaded(), []
    #: Pythons with gh-106905 fail at random when two threads parse at a time. A launch mends that.
    parser = threading.Lock()
    with launches.recorded(KERNELS, "vllm.v1.sample.ops.topk_topp_sampler"):
        kernels = importlib.import_module(KERNELS)
        kernel = triton.jit(small_kernel)

        compile_kernel = triton.compiler.compile

        def note(*args: Any, **named: Any) -> Any:
            threads.append(threading.current_thread().name)
            with parser:
                return compile_kernel(*args, **named)

        with modules.imported_anew("vllm.v1.readiness.sample.compilation"):
            module = importlib.import_module("vllm.v1.readiness.sample.compilation")
            monkeypatch.setattr(triton.compiler, "compile", note)
            monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", None)
            monkeypatch.setattr(driver, "_active", device)
            monkeypatch.setattr(kernels, "_topk_topp_kernel", kernel)
            monkeypatch.setattr(kernels, "num_compute_units", lambda _: 132)
            monkeypatch.setattr(kernels, "reset_buffer_cache", kernels._TRITON_BUFFER_CACHE.clear)
            yield Compiled(module=module, device=device, threads=threads, kernels=kernels)


def test_threads_compile_what_is_launched_later(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = compiled.module.FilterKernels(SIZES, VOCABULARY)
    kernel = compiled.kernels._topk_topp_kernel
    filters.start_compilation()
    filters.start_compilation()
    assert compiled.kernels._topk_topp_kernel is kernel
    assert compiled.kernels._TRITON_BUFFER_CACHE == {}
    assert compiled.device.launched == []
    filters.wait()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    filters.launch(torch.zeros(16, VOCABULARY))
    assert len(compiled.threads) == 6
    assert all(name.startswith("readiness-compilation") for name in compiled.threads)
    assert len(set(compiled.device.launched)) == len(compiled.device.launched) == 6
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "moved")
    filters.launch(torch.zeros(16, VOCABULARY))
    assert len(compiled.threads) == 6
    assert len(list((tmp_path / "triton").glob("*/*.cubin"))) == 6
    assert not (tmp_path / "moved").exists()
    for thread in threading.enumerate():
        if thread.name.startswith("readiness-compilation"):
            thread.join(60)
            assert not thread.is_alive()


def test_the_dummy_runs_find_what_is_compiled_by_then(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = compiled.module.FilterKernels(SIZES, VOCABULARY)
    with ThreadPoolExecutor(6, "readiness-compilation") as pool:
        monkeypatch.setattr(compiled.module, "ThreadPoolExecutor", lambda *_: pool)
        filters.start_compilation()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    ones = torch.ones(16)
    compiled.kernels.apply_top_k_top_p_triton(torch.zeros(16, VOCABULARY), None, ones)
    assert len(compiled.device.launched) == 1
    assert len(compiled.threads) == 6
    filters.wait()


def test_another_rank_reads_what_the_first_wrote(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled.module.FilterKernels(SIZES, VOCABULARY)
    other = compiled.module.FilterKernels(SIZES, VOCABULARY)
    first.start_compilation()
    first.wait()
    written = {each: each.stat().st_mtime_ns for each in (tmp_path / "triton").rglob("*.cubin")}
    compiled.kernels._topk_topp_kernel.device_caches.clear()  # as in a process of its own
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    other.wait()
    other.launch(torch.zeros(16, VOCABULARY))
    assert len(compiled.device.launched) == 6
    assert len(compiled.threads) == 12  # six asked the compiler, which found the files
    assert written == {each: each.stat().st_mtime_ns for each in written}
    assert not (tmp_path / "moved").exists()


def test_a_variant_that_fails_in_a_thread_fails_when_it_is_launched(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    filters = compiled.module.FilterKernels(SIZES, VOCABULARY)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton.compiler, "compile", refuse)
    filters.start_compilation()
    filters.wait()
    with pytest.raises(RuntimeError, match="no compiler"):
        filters.launch(torch.zeros(16, VOCABULARY))


def test_the_mode_is_on_for_no_other_kernel(compiled: Compiled) -> None:
    filters = compiled.module.FilterKernels(SIZES, VOCABULARY)
    filters.start_compilation()
    other = triton.jit(small_kernel)
    ones = torch.ones(9)
    sizes = {"BATCH_SIZE": 9, "VOCAB_SIZE": 9, "BLOCK_SIZE": 8, "BLOCK_SIZE_TRUNC": 8}
    enabled = {"TOPK_ENABLED": True, "TOPP_ENABLED": False}
    other[(1,)](ones, 1, ones, ones, ones, ones, ones, MASK_VALUE=0.0, **sizes, **enabled)
    assert len(compiled.device.launched) == 1
    filters.wait()
