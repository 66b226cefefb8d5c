"""Feature ``rope-positions``: M-RoPE and XD-RoPE positions are sent without a wait.

With M-RoPE and XD-RoPE, a token has one position per dimension. Upstream keeps the positions in a
pinned buffer with one row per dimension, and copies the first columns of all rows to the device at
once. This slice is not contiguous, so torch copies it through pageable memory. CUDA guarantees only
up to 64 KiB that such a copy does not wait for the device. Here larger slices are copied row by
row, because a slice of one row is contiguous.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Bytes up to which CUDA copies from pageable memory without waiting.
_STAGED = 64 << 10


def send(runner: "GPUModelRunner", tokens: int) -> bool:
    """Copy a step's positions to the device; False to fall back to upstream, up to 64 KiB."""
    if registry.ROPE_POSITIONS not in switch.enabled():
        return False
    if runner.uses_mrope:
        positions = runner.mrope_positions
    elif runner.uses_xdrope_dim > 0:
        positions = runner.xdrope_positions
    else:
        return False
    source, target = positions.cpu, positions.gpu
    if source[:, :tokens].nbytes <= _STAGED:
        return False
    for dimension in range(len(source)):
        target[dimension, :tokens].copy_(source[dimension, :tokens], non_blocking=True)
    return True
