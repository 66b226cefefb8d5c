"""Fix ``draft-lengths``: a request near max_model_len stops no other request's drafts.

If the longest request plus drafts exceeds max_model_len, 0.22.0 drafts for no request of the batch,
and verifies zeros as drafts of all. Meanwhile no draft is accepted, and a seeded request samples
other tokens than alone, because the draws depend on the drafts. The n-gram drafter on the host caps
the drafts of each request by itself, and the scheduler cuts what exceeds max_model_len. Here this
drafter always drafts. Other drafters draft as in 0.22.0.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens
# mirrors: vllm.v1.spec_decode.ngram_proposer:NgramProposer

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def caps_drafts(runner: "GPUModelRunner") -> bool:
    """Return whether the drafter caps each request's drafts by max_model_len."""
    config = runner.speculative_config
    caps = config is not None and config.method == "ngram"
    return caps and registry.DRAFT_LENGTHS in switch.enabled()
