"""Feature ``rope-positions``: M-RoPE and XD-RoPE positions are sent without a wait.

M-RoPE and XD-RoPE give a token a position in each of several dimensions. Upstream keeps the
positions in a pinned buffer, one row per dimension, and copies the first columns of all rows to the
device at once. This slice is not contiguous, so the copy goes through pageable memory. Up to
64 KiB, CUDA guarantees that such a copy does not wait for the device. Beyond that, the driver
decides. Here a larger step's rows are copied one by one: the slice of one row is contiguous.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs

from typing import TYPE_CHECKING

from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Bytes that CUDA copies from pageable memory without waiting.
_STAGED = 64 << 10


class RopePositions(Feature):
    """M-RoPE and XD-RoPE positions of one runner's steps."""

    pooling = True

    def send_positions(self, runner: "GPUModelRunner", tokens: int) -> bool | None:
        """Send a step's positions, unless they fit into 64 KiB or are not in pinned memory."""
        if runner.uses_mrope:
            positions = runner.mrope_positions
        elif runner.uses_xdrope_dim > 0:
            positions = runner.xdrope_positions
        else:
            return None
        source, target = positions.cpu, positions.gpu
        if not runner.pin_memory or source[:, :tokens].nbytes <= _STAGED:
            return None
        for dimension in range(len(source)):
            target[dimension, :tokens].copy_(source[dimension, :tokens], non_blocking=True)
        return True
