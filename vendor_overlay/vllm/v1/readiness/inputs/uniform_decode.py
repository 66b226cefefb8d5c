"""Fix ``uniform-decode``: no prefill chunk runs in the CUDA graph of uniform decodes.

0.22.0 treats a step as a uniform decode if each request has the number of tokens of a decode: one
plus its drafts. A prefill chunk of that length also matches, which is right for attention. But the
metadata of a Mamba layer counts the chunk as a prefill, and leaves an earlier step's values in the
tensors that the full CUDA graph reads. The graph then skips the chunk, and writes to the states of
the earlier step's requests.
(https://github.com/vllm-project/vllm/issues/49918, 53051)
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._is_uniform_decode
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

if TYPE_CHECKING:
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def force(
    runner: "GPUModelRunner", longest: int, drafts: "SpecDecodeMetadata | None"
) -> bool | None:
    """Return False if a step of a hybrid model is not a uniform decode; None to fall back.

    ``longest`` is the step's ``max_query_len``. Without drafts, only a request's first prefill
    chunk matters: a later prefill chunk of one token continues from a state, like a decode.
    """
    if longest != runner.uniform_decode_query_len or not runner.kv_cache_config.has_mamba_layers:
        return None
    if registry.UNIFORM_DECODE not in switch.enabled():
        return None
    batch, count = runner.input_batch, runner.input_batch.num_reqs
    computed = batch.num_computed_tokens_cpu[:count]
    if longest == 1:
        prefills = computed == 0
    elif drafts is None or min(drafts.num_draft_tokens) < longest - 1:
        return False
    else:
        prefills = computed < batch.num_prompt_tokens[:count]
    return False if prefills.any() else None
