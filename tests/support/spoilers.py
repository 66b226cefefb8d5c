"""Faults in the overlaid side of a benchmark, as a plugin that both sides load.

Each spoils one row: steps of plain requests get slower, requests with penalties and no logprobs get
a wrong token, and requests with logprobs and no penalties lose the logprobs of one step.
"""

import time
from importlib.util import find_spec
from typing import Any

#: Seconds added to a step of plain requests: far more than a busy machine adds.
SLOWER = 0.5
#: Row of the batch and output position that get a wrong token.
WRONG = 1, 5
#: Output position that loses its logprobs.
LOST = 7


def spoil() -> None:
    """Spoil this process's steps, if the overlay is installed."""
    if find_spec("vllm.v1.readiness") is None:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, sample_tokens = GPUModelRunner._sample, GPUModelRunner.sample_tokens

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.input_batch.no_penalties and not self.input_batch.num_logprobs:
            time.sleep(SLOWER)
        return sample(self, *args, **kwargs)

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        result = sample_tokens(self, *args, **kwargs)
        lengths = {len(tokens) for tokens in batch.req_output_token_ids if tokens is not None}
        logprobs = bool(batch.num_logprobs)
        if logprobs and batch.no_penalties and lengths == {LOST + 1}:
            result.logprobs = None
        elif not batch.no_penalties and not logprobs and lengths == {WRONG[1] + 1}:
            row = result.sampled_token_ids[WRONG[0]]
            row[0] = (row[0] + 1) % 1000
        return result

    GPUModelRunner._sample, GPUModelRunner.sample_tokens = slow, wrong
