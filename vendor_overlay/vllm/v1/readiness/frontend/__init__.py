"""The front end, and messages to it: logprobs, refused requests."""

# mirrors: nothing

from vllm.v1.readiness.engine.doors import door

__getattr__ = door(
    __name__,
    "bad_requests",
    "cached_prompt_logprobs",
    "grammar_limits",
    "logprob_messages",
    "logprobs",
    "request_types",
)
