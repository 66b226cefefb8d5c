"""Fix ``recovered-tokens``: the token that replaces a rejected draft is in the vocabulary.

0.22.0's rejection sampler searches for this token in tiles of 8192 scores, padded with 0 beyond the
vocabulary. If the probabilities of a row are NaN, the sampler may return an id from the padding. A
row is NaN if all tokens that a request may sample are masked, for example its stop tokens by
``min_tokens``. The id is dropped later, and a step without a token may stall the request or fail
the engine. A drafter or model that gets the id reads out of bounds.
(https://github.com/vllm-project/vllm/security/advisories/GHSA-8wr5-jm2h-8r4f)

Here such an id is replaced by 0, which vLLM's sampler returns for such a row without drafts. The
fix is switched on or off when this module is imported, because the kernel has no argument for it.
"""

# mirrors: vllm.v1.sample.rejection_sampler:sample_recovered_tokens_kernel

from vllm.triton_utils import tl, triton
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch


@triton.jit
def _bound(token, vocab_size):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Replace an id at or above ``vocab_size`` by 0."""
    return tl.where(token < vocab_size, token, 0)


@triton.jit
def _keep(token, vocab_size):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return the id unchanged; used if the fix is off."""
    return token


def _enabled() -> bool:
    try:
        return registry.RECOVERED_TOKENS in switch.enabled()
    except switch.SwitchError:  # reported at start-up
        return False


#: ``sample_recovered_tokens_kernel`` applies this function to each id before storing the id.
in_vocabulary = _bound if _enabled() else _keep
