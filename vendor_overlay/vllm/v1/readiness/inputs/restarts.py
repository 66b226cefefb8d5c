"""Worker part of the fix ``failed-loads``: requests restart in their initial state.

A request whose KV load failed joins the batch again, without the tokens sampled after the load. The
worker has drawn these with the request's generator, and may have computed the logprobs of its
prompt, which upstream does only once. Here the generator is reset if the request joins again with
the same number of tokens. Prompt logprobs are computed again with the prompt.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: Attribute of a request: its token count and generator state when it joined the batch.
_JOINED = "readiness_joined"


class Restarts(Feature):
    """Restarted requests of one batch."""

    pooling = True

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Reset the generator and the prompt logprobs; a no-op without a KV connector."""
        if not has_kv_transfer_group():
            return
        generator = request.generator
        if generator is not None:
            tokens, state = vars(request).get(_JOINED, (None, None))
            if tokens == request.num_tokens:
                generator.set_state(state)
            else:
                vars(request)[_JOINED] = request.num_tokens, generator.get_state()
        params = request.sampling_params
        if params is None or params.prompt_logprobs is None or request.output_token_ids:
            return
        if request.num_computed_tokens < request.num_prompt_tokens:
            count = params.prompt_logprobs
            runner.num_prompt_logprobs[request.req_id] = (
                runner.input_batch.vocab_size if count == -1 else count
            )
