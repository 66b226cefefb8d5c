"""Compilation of upstream's kernel of top_k and top_p, in threads beside the start of an engine.

A batch can reach six variants of this kernel. Triton compiles them for some 20 s of one core, much
longer than all else that the warm-up launches. Its asynchronous mode does so in threads, which
hold the interpreter for about a second in all, while the engine loads its weights and captures its
graphs. Until the launches at the end of start-up, no memory of the device is used.
"""

# mirrors: vllm.v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton
from vllm.v1.sample.ops import topk_topp_triton as kernels

if TYPE_CHECKING:
    from triton.runtime._async_compile import FutureKernel
    from triton.runtime.jit import JITFunction

#: Whether a batch has top_k and top_p; the variants that compile longest are first.
_FILTERS = ((True, True), (False, True), (True, False))


class FilterKernels:
    """The kernel's variants for the logits of one process.

    Args:
        batch_sizes: one size of each class that Triton distinguishes.
        vocab_size: width of the logits.
    """

    def __init__(self, batch_sizes: Sequence[int], vocab_size: int) -> None:
        self._sizes = batch_sizes
        self._vocab_size = vocab_size
        #: Where threads write, and other ranks read; vLLM moves Triton's directory afterwards. A
        #: thread that has not begun by then writes to the other, and the next start compiles again.
        self._folder = triton.knobs.cache.dir
        #: The mode holds in a context of its own, so that it is on for no other kernel.
        self._started: tuple[triton.AsyncCompileMode, Context] | None = None

    def start_compilation(self) -> None:
        """Compile in threads, unless this has been called. An interpreter's exit waits for them."""
        if self._started is None:
            pool = ThreadPoolExecutor(len(self._sizes) * len(_FILTERS), "readiness-compilation")
            mode = triton.AsyncCompileMode(pool, ignore_errors=True)
            context = copy_context()
            context.run(mode.__enter__)
            self._started = mode, context
            with _not_launched():
                context.run(self._launch, torch.zeros(max(self._sizes), self._vocab_size))
            for variant in mode.future_kernels.values():  # the dummy runs may be the first launch
                variant.future.add_done_callback(partial(_keep, variant))
            pool.shutdown(wait=False)  # a thread ends with its variant

    def wait(self) -> None:
        """Wait for the threads. What failed in one is compiled when it is launched."""
        if self._started is not None:
            mode, context = self._started
            context.run(mode.__exit__, None, None, None)

    def launch(self, logits: torch.Tensor) -> None:
        """Launch each variant.

        Args:
            logits: (rows, vocab_size), float32, with a row for each of the largest batch size.
                Changed.
        """
        with triton.knobs.cache.scope():
            triton.knobs.cache.dir = self._folder
            self._launch(logits)

    def _launch(self, logits: torch.Tensor) -> None:
        for top_k, top_p in _FILTERS:
            for size in self._sizes:
                ones = torch.ones(size, device=logits.device)
                kernels.apply_top_k_top_p_triton(
                    logits[:size], ones.to(torch.int32) if top_k else None, ones if top_p else None
                )


def _keep(variant: "FutureKernel", _: "Future[Any]") -> None:
    """Let launches of this process find a variant, wherever Triton's directory is by then."""
    variant.result(ignore_errors=True)


class _Compiled:
    """A kernel whose launches compile it, and no more."""

    def __init__(self, kernel: "JITFunction") -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._kernel.warmup, grid=grid)


@contextmanager
def _not_launched() -> Iterator[None]:
    kernel = kernels._topk_topp_kernel
    kernels._topk_topp_kernel = _Compiled(kernel)
    try:
        yield
    finally:
        kernels._topk_topp_kernel = kernel
        kernels.reset_buffer_cache()
