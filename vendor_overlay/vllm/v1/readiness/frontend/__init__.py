"""Front end: requests in, logprobs and messages out."""

# mirrors: nothing

from typing import TYPE_CHECKING

from vllm.v1.readiness.engine.doors import door

if TYPE_CHECKING:  # for editors
    from vllm.v1.readiness.frontend import (
        aborted_parents,
        bad_requests,
        cached_prompt_logprobs,
        chunks,
        grammar_bounds,
        grammar_pipelines,
        histograms,
        logprob_messages,
        logprobs,
        mm_caches,
        mm_hashes,
        request_times,
        request_types,
        step,
        stop_strings,
        turns,
        unchecked_requests,
        unread,
    )

__getattr__ = door(__name__)
