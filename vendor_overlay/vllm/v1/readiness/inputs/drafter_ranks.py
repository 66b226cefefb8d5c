"""Fix ``drafter-ranks``: every data-parallel rank runs its drafter if any rank drafts.

A draft model runs collectives with the other data-parallel ranks, to agree on the batch size and to
dispatch tokens to experts. 0.22.0 skips the drafter on a rank whose longest request plus drafts
exceeds the drafter's max_model_len. Other ranks that draft, or run the drafter in a dummy batch,
hang. Here a rank that does not draft runs the drafter on a dummy token, as idle ranks do.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def take_part(runner: "GPUModelRunner") -> None:
    """Run the drafter on a dummy token, if this rank does not draft but other ranks may."""
    config = runner.speculative_config
    on = registry.DRAFTER_RANKS in switch.enabled()
    if not on or config is None or runner.parallel_config.data_parallel_size == 1:
        return
    # Conditions under which the runner's dummy runs include the drafter.
    if config.use_eagle() or config.uses_draft_model() or config.uses_extract_hidden_states():
        runner.drafter.dummy_run(num_tokens=1)
