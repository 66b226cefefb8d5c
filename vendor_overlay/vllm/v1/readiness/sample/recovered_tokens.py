"""Fix ``recovered-tokens``: the token that replaces a rejected draft is in the vocabulary.

0.22.0's rejection sampler searches for it in tiles of 8192 scores, padded with 0 after the
vocabulary. If a row's probabilities are NaN, it may return an id beyond the vocabulary. A request
gets such a row if all its allowed tokens are masked, as ``min_tokens`` masks its stop tokens. The
id is dropped later, and a step without a token for a request may stall the request or fail the
engine. A drafter or model that gets the id reads out of bounds.
(https://github.com/vllm-project/vllm/security/advisories/GHSA-8wr5-jm2h-8r4f)

Here the id is 0 in that case, which vLLM's sampler returns for such a row without drafts. All other
ids are upstream's. The fix is switched per process when this module is imported, since the kernel
that calls it has no argument for it.
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
    """Return the id unchanged; used with the fix off."""
    return token


def _enabled() -> bool:
    try:
        return registry.RECOVERED_TOKENS in switch.enabled()
    except switch.SwitchError:  # startup reports it
        return False


#: Called by ``sample_recovered_tokens_kernel`` with the id that it is about to store.
in_vocabulary = _bound if _enabled() else _keep
