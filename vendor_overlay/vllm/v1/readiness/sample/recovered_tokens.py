"""Fix ``recovered-tokens``: the token that replaces a rejected draft is in the vocabulary.

0.22.0's rejection sampler looks for it in tiles of 8192 scores, with 0 behind the end of the
vocabulary. Where a row's probabilities are NaN, it may find an id behind the end. A request
gets such a row if each token that it may have is forbidden, as its stop tokens are by
``min_tokens``. Such an id is dropped, and a step that gives a request no token may stall it
or end the engine; a drafter or a model that reads the id first reads out of bounds.
(https://github.com/vllm-project/vllm/security/advisories/GHSA-8wr5-jm2h-8r4f)

Here the id is 0 in that case, which is what vLLM's sampler gives such a row without drafts.
Every other id is upstream's. Whether the fix is on is decided for the process when this
module is imported, since the kernel that calls it has no argument for it.
"""

# mirrors: vllm.v1.sample.rejection_sampler:sample_recovered_tokens_kernel

from vllm.triton_utils import tl, triton
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch


@triton.jit
def _bound(token, vocab_size):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Replace an id at or above ``vocab_size``."""
    return tl.where(token < vocab_size, token, 0)


@triton.jit
def _keep(token, vocab_size):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the id, for the fix switched off."""
    return token


def _enabled() -> bool:
    try:
        return registry.RECOVERED_TOKENS in switch.enabled()
    except switch.SwitchError:  # startup reports it
        return False


#: Called by ``sample_recovered_tokens_kernel`` with the id that it is about to store.
in_vocabulary = _bound if _enabled() else _keep
