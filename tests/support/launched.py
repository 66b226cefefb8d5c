"""Launches of Triton's kernels without a GPU: each kernel writes sums of what it reads.

A kernel stands for the one of its name: it reads all tensors that it is given, by address, and
writes to those that the real one writes to. Its results depend on each byte that it reads, on its
numbers and on its grid, and are not those of the real one. The arguments are bound by Triton.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from vllm.v1.readiness.layers import launches, repeats

from support import modules

STREAM = 7
_MAMBA = "vllm.model_executor.layers.mamba"
#: Upstream's modules that launch the kernels, and the layers'.
PARTS = (
    f"{_MAMBA}.ops",
    f"{_MAMBA}.mamba_mixer2",
    f"{_MAMBA}.gdn",
    "vllm.model_executor.layers.fla",
)
#: Kernel to the parameters that it writes to.
WRITTEN: Mapping[str, Sequence[str]] = {
    "_causal_conv1d_fwd_kernel": ("initial_states_ptr", "o_ptr"),
    "_chunk_cumsum_fwd_kernel": ("dt_out_ptr", "dA_cumsum_ptr"),
    "_chunk_state_fwd_kernel": ("states_ptr",),
    "_state_passing_fwd_kernel": ("out_ptr",),
    "_bmm_chunk_fwd_kernel": ("out_ptr",),
    "_chunk_scan_fwd_kernel": ("out_ptr",),
    "_causal_conv1d_update_kernel": ("conv_state_ptr", "o_ptr"),
    "_selective_scan_update_kernel": ("state_ptr", "out_ptr"),
    "_fused_post_conv_kernel": ("q_ptr", "k_ptr", "v_ptr", "g_ptr", "beta_ptr"),
    "chunk_local_cumsum_scalar_kernel": ("o",),
    "chunk_scaled_dot_kkt_fwd_kernel": ("A",),
    "merge_16x16_to_64x64_inverse_kernel": ("Ai",),
    "recompute_w_u_fwd_kernel": ("w", "u"),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ("h", "v_new", "ht"),
    "chunk_fwd_kernel_o": ("o",),
    "fused_recurrent_gated_delta_rule_packed_decode_kernel": ("ht", "o"),
    "fused_sigmoid_gating_delta_rule_update_kernel": ("ht", "o"),
}
#: Parameters that a kernel both reads and writes.
_STATES = ("initial_states_ptr", "conv_state_ptr", "state_ptr")


class Compiled:
    """Stands for a compiled kernel, for tensors as in its first launch."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, name: str, parameters: Mapping[str, Any]) -> None:
        self._name = name
        self._first = dict(parameters)

    def run(self, *values: Any) -> None:
        """Read, and write to, the memory at the tensors or addresses among the values."""
        *grid, stream, function, metadata, _, _, _ = values[:9]
        assert (stream, function, metadata) == (STREAM, self.function, self.packed_metadata)
        given = dict(zip(self._first, values[9:], strict=True))
        memory = {
            name: _memory(first, given[name])
            for name, first in self._first.items()
            if isinstance(first, torch.Tensor)
        }
        written = [name for name in WRITTEN[self._name] if name in memory]
        numbers = [value for name, value in given.items() if name not in memory]
        total = sum(map(ord, repr((self._name, grid, numbers))))
        for place, (name, tensor) in enumerate(memory.items()):
            if name not in written or name in _STATES:
                total += (place + 2) * _sum(tensor)
        for place, name in enumerate(written):
            target = memory[name]
            new = (torch.arange(target.numel()) * (place + 3) + total % 1009) % 97
            target.copy_(new.view(target.shape).to(target.dtype))


def _memory(first: torch.Tensor, given: Any) -> torch.Tensor:
    """Return the memory of a tensor, or that at an address as if it were the first tensor."""
    if isinstance(given, torch.Tensor):
        return given
    if not first.numel():
        return first
    extent = 1 + sum((n - 1) * s for n, s in zip(first.shape, first.stride(), strict=True))
    memory = (ctypes.c_char * (extent * first.element_size())).from_address(given)
    return torch.frombuffer(memory, dtype=first.dtype).as_strided(first.shape, first.stride())


def _sum(tensor: torch.Tensor) -> int:
    """Return a sum that depends on the value and the place of each byte."""
    packed = tensor.new_empty(tensor.numel()).copy_(tensor.reshape(-1))
    numbers = packed.view(torch.uint8).long()
    return int((numbers * (torch.arange(len(numbers)) % 251 + 1)).sum())


def run(function: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Compiled:
    """Stand for ``JITFunction.run``."""
    known = function.signature.parameters
    bound = function.signature.bind(
        *args, **{name: value for name, value in named.items() if name in known}
    )
    bound.apply_defaults()
    parameters = dict(bound.arguments)
    size = grid(parameters) if callable(grid) else grid
    kernel = Compiled(function.__name__, parameters)
    padded = (*size, 1, 1)[:3]
    kernel.run(*padded, STREAM, "function", "metadata", None, None, None, *parameters.values())
    return kernel


def _tuned(self: Any, *args: Any, **named: Any) -> Any:
    """Stand for ``Autotuner.run``, which times each configuration."""
    return self.fn.run(*args, **named, **self.configs[0].all_kwargs())


@contextmanager
def layers() -> Iterator[Callable[[str], Any]]:
    """Import upstream's layers with Triton, whose kernels are those of this module.

    Yields:
        What returns an imported module below vllm.model_executor.layers.mamba.
    """
    for name in ("mamba_mixer2", "gdn.qwen_gdn_linear_attn"):
        import_module(f"{_MAMBA}.{name}")  # and what it imports, which registers operators
    facade = modules.triton_facade()
    facade.tldevice = import_module("triton.language.extra.libdevice")
    with (
        pytest.MonkeyPatch.context() as patch,
        modules.unregistered(),
        modules.imported_anew(*PARTS),
    ):
        patch.setitem(sys.modules, "vllm.triton_utils", facade)
        patch.setattr(Autotuner, "run", _tuned)
        patch.setattr(JITFunction, "run", launches.noted(run))
        patch.setattr(launches, "_watch", lambda: True)
        patch.setattr(repeats, "_stream", lambda tensor: STREAM)
        patch.setattr(repeats, "_memory", lambda device: 1 << 40)
        patch.setattr(torch.accelerator, "device_index", lambda index: nullcontext())
        yield lambda name: import_module(f"{_MAMBA}.{name}")
