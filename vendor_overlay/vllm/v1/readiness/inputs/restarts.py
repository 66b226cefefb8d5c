"""The worker's part of the fix ``failed-loads``: requests that return as they came.

A request whose KV load failed joins the batch again without the tokens that were sampled from it.
The worker has drawn these with the request's generator, and has computed the logprobs of its
prompt, which it does once. Here a request that joins with as many tokens as it joined with before
has its generator set back to that moment, and the logprobs of a prompt are computed whenever the
prompt is.
"""

# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states
# mirrors: vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.readiness.feature import Feature

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

#: The attribute of a request's state that holds its number of tokens as it joined the batch, and
#: the state of its generator.
_JOINED = "readiness_joined"


class Restarts(Feature):
    """The worker's part of the fix, for one batch."""

    pooling = True

    def rejoin(self, runner: "GPUModelRunner", request: "CachedRequestState") -> None:
        """Set back the generator and the prompt logprobs; no-op without a KV connector."""
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
            every = params.prompt_logprobs == -1
            vocab_size = runner.input_batch.vocab_size
            count = vocab_size if every else params.prompt_logprobs
            runner.num_prompt_logprobs[request.req_id] = count
