"""Fix ``cpu-seeds``: on the CPU, a seed applies with chunked prefill and in mixed batches.

0.22.0 samples a token for every row of a step, and discards the token of a row with further prefill
chunks. It then rewinds the offset of the row's generator, so that the chunks do not affect the
tokens of a seeded request. CPU generators have no offset, and the engine fails. Here the whole
state of the generator is saved before sampling and restored afterwards.

The CPU sampler also ignores all seeds unless every row of the batch has one, so the tokens of a
seeded request depend on other requests. Here each seeded row uses its seed.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync
# mirrors: vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    import torch
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class CpuSeeds:
    """Saved generator states of one batch on the CPU."""

    def __init__(self, batch: "InputBatch") -> None:
        self.batch = batch
        self._states: dict[int, torch.Tensor] = {}

    def keep(self, runner: "GPUModelRunner | None") -> None:
        """Save the generator state of each row whose sampled token will be discarded."""
        generators, mask = self.batch.generators, getattr(runner, "discard_request_mask", None)
        if generators and mask is not None:
            rows = [row for row in generators if mask.np[row]]
            self._states = {row: generators[row].get_state() for row in rows}

    def rewind(self, row: int) -> bool:
        """Restore a row's saved generator state; False to fall back to upstream."""
        state = self._states.pop(row, None)
        if state is None:
            return False
        self.batch.generators[row].set_state(state)
        return True


def leave_out(generators: "Mapping[int, torch.Generator]", rows: int) -> bool:
    """Return whether to sample a batch of ``rows`` rows without per-request generators."""
    if len(generators) == rows:
        return False
    return not generators or registry.CPU_SEEDS not in switch.enabled()
