"""Fix ``closed-grammars``, stop tokens: no stop token ends a request inside its grammar.

A grammar ends with the tokenizer's end-of-sequence token. A request also stops at its
``stop_token_ids``, to which the front end adds the further ids of generation_config.json. The
grammar's bitmask allows such a token wherever its text is legal, so 0.22.0 ends a reply in the
middle of a JSON string (https://github.com/vllm-project/vllm/issues/42403). Here, as in later
releases, both kinds are masked until the grammar may end
(https://github.com/vllm-project/vllm/pull/49227). Where the grammar allows nothing else, such a
token is text, and does not stop the request. Structural tags are left to upstream, because a tag
may end with a stop token, and so are requests that restrict tokens themselves: the stop token may
be the only one that is left.
"""

# mirrors: vllm.v1.core.sched.utils:check_stop
# mirrors: vllm.v1.structured_output.backend_types:StructuredOutputGrammar

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.v1.readiness import registry
from vllm.v1.readiness.core import records
from vllm.v1.readiness.engine import subclasses, switch
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend


class Stops(NamedTuple):
    """Stop tokens of a request with a grammar."""

    end: int  #: The token with which the grammar ends.
    others: frozenset[int]  #: The request's other stop tokens.
    size: int  #: Size of the backend's vocabulary.

    def may_end(self, row: "torch.Tensor") -> bool:
        """Return whether a row of the bitmask allows the grammar's end."""
        return bool(int(row[self.end // 32]) >> self.end % 32 & 1)

    def mask(self, row: "torch.Tensor") -> None:
        """Forbid the other stop tokens in a row, unless it allows the end, or nothing else."""
        if self.may_end(row):
            return
        words = row.numpy().view(np.uint32)
        before = [(token // 32, words[token // 32]) for token in self.others]
        for token in self.others:
            words[token // 32] &= ~np.uint32(1 << token % 32)
        if not any(words[word] for word, _ in before) and not words.any():
            for word, value in before:
                words[word] = value


def of(backend: "StructuredOutputBackend", request: "Request") -> Stops | None:
    """Return a request's stop tokens; None if only the grammar's end stops it."""
    params, structured = request.sampling_params, request.structured_output_request
    size: int = getattr(backend, "ll_tokenizer", backend).vocab_size
    end = backend.tokenizer.eos_token_id
    if params is None or structured is None or end is None or end >= size:
        return None
    if structured.structured_output_key[0] == StructuredOutputOptions.STRUCTURAL_TAG:
        return None
    if params.allowed_token_ids or params.bad_words_token_ids:
        return None
    others = frozenset(token for token in params.stop_token_ids or () if 0 <= token < size)
    return Stops(end, others - {end}, size) if others - {end} else None


def begin(request: "Request") -> None:
    """Note that a step's tokens are about to be appended to a request."""
    if request.structured_output_request is not None:
        records.of(request).before = request.num_output_tokens


def is_text(request: "Request") -> bool:
    """Return whether a stop token, a request's newest token, is text of its grammar."""
    structured = request.structured_output_request
    if structured is None or registry.CLOSED_GRAMMARS not in switch.enabled():
        return False
    end = getattr(structured.grammar, subclasses.ATTRIBUTE, None)
    stops: Stops | None = None if end is None else end.stops
    before = records.of(request).before
    if stops is None or before is None or request.output_token_ids[-1] not in stops.others:
        return False
    if structured.reasoner is not None and not structured.reasoning_ended:
        return False
    return not structured.grammar.may_end(request.output_token_ids[before:-1])
