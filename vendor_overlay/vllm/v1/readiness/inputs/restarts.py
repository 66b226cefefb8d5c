"""Worker part of the fix ``failed-loads``: requests restart in their initial state.

A request whose KV load failed rejoins the batch without the tokens sampled after the load. Sampling
these has advanced the request's generator, and the prompt logprobs, which upstream computes once,
may be computed already. Here the generator is reset if the request rejoins with the same number of
tokens, and prompt logprobs are recomputed with the prompt.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.inputs import records

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def rejoin(runner: "GPUModelRunner", request: "CachedRequestState") -> None:
    """Reset the generator and the prompt logprobs; a no-op without a KV connector."""
    on = not {registry.FAILED_LOADS, registry.KV_TRANSFERS}.isdisjoint(switch.enabled())
    if not on or not has_kv_transfer_group():
        return
    generator = request.generator
    if generator is not None:
        joined = records.of(request).joined
        if joined is not None and joined[0] == request.num_tokens:
            generator.set_state(joined[1])
        else:
            records.of(request).joined = request.num_tokens, generator.get_state()
    params = request.sampling_params
    if params is None or params.prompt_logprobs is None or request.output_token_ids:
        return
    if request.num_computed_tokens < request.num_prompt_tokens:
        count = params.prompt_logprobs
        runner.num_prompt_logprobs[request.req_id] = (
            runner.input_batch.vocab_size if count == -1 else count
        )
