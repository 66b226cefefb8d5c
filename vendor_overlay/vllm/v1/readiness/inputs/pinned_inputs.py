"""Fix ``pinned-inputs``: a step's pinned inputs stay unchanged until the device has read them.

A step's inputs are copied to the device from pinned tensors that the next step overwrites. Under
async scheduling the runner waits for the copies first. Without it, 0.22.0 has no event to wait for,
because the host waits for the sampled tokens anyway. But two kinds of steps do not sample: steps of
all pipeline stages but the last, and steps of a pooling model in which no prompt ends. The next
step, even one without requests, then overwrites inputs that the device may not have read yet.
(https://github.com/vllm-project/vllm/pull/47644, 48214)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner.synchronize_input_prep

from typing import TYPE_CHECKING

import torch
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def keep(runner: "GPUModelRunner") -> None:
    """Create ``prepare_inputs_event`` if the runner needs it. Called in the constructor."""
    if runner.prepare_inputs_event is not None or registry.PINNED_INPUTS not in switch.enabled():
        return
    if runner.parallel_config.pipeline_parallel_size > 1 or runner.is_pooling_model:
        runner.prepare_inputs_event = torch.Event()
