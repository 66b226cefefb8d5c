"""Serve mixed requests, and write what is compiled for them after the engine has started.

    python warm_up.py MODEL_DIR OUT.json ENGINE

ENGINE is a name in :data:`kinds.ENGINES`. OUT.json holds the variants that Triton compiles, and
torch.compile's compilations, before and after the start; and the seconds of the start. A variant
counts as compiled if this process launches it for the first time, whatever is cached on disk.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm  # noqa: F401  (sets up what torch reads when it is imported)

# isort: split
import torch
import triton
from engine.generate import NOT_WITH_DRAFTS
from gpu import kinds, parity
from support.checkpoint import VOCABULARY, generate
from support.engine_loop import Arrival, build_engine, run_requests

SIZES = (1, 2, 3, 16, 17, 32)
TOKENS = 6
#: Settings by kind of batch.
BATCHES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "drawn": [{"temperature": 0.9}],
    "top-p": [{"temperature": 0.9, "top_p": 0.9}],
    "top-k": [{"temperature": 0.9, "top_k": 9}],
    "both": [{"temperature": 0.9, "top_p": 0.9, "top_k": 9}],
    "min-p": [{"temperature": 0.9, "min_p": 0.1}],
    "seeds": [{"temperature": 0.9, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "seed": 6}],
    "logprobs": [{"logprobs": 0}, {"logprobs": 5}, {"temperature": 0.9, "logprobs": 5}],
    "prompts": [{"prompt_logprobs": 0}, {"prompt_logprobs": 5}],
    "penalties": [{"presence_penalty": 1.0}, {"repetition_penalty": 1.2, "logprobs": 1}],
    "bad words": [{"bad_words": [[5], [6, 7]]}],
    "allowed": [{"allowed_token_ids": list(range(3, 90))}, {"logit_bias": {7: 2.0}}],
    "grammars": [{"structured_outputs": "parity"}],
    "some grammars": [{"structured_outputs": "parity"}, {}],
}


class Compilations:
    """Compilations by Triton and torch.compile since the start of the record."""

    def __init__(self) -> None:
        self.names: list[str] = []
        hook = triton.knobs.runtime.jit_cache_hook

        def note(*, repr: str, **named: Any) -> Any:
            self.names.append(repr)
            return hook(repr=repr, **named) if hook is not None else None

        triton.knobs.runtime.jit_cache_hook = note

    def begin(self, arguments: Any) -> None:
        """Note a compilation of torch.compile's."""
        self.names.append(f"torch.compile {arguments.compile_id}")

    def take(self) -> list[str]:
        """Return the names so far, and forget them."""
        callbacks = torch._dynamo.callback.callback_handler.start_callbacks
        if self.begin not in callbacks:  # a reset of dynamo removes it
            callbacks.append(self.begin)
        names, self.names[:] = list(self.names), []
        return names


def requests(kind: str, size: int, drafts: bool) -> list[Arrival]:
    """Return ``size`` requests of a kind, or none if vLLM refuses them with drafts."""
    from vllm.sampling_params import StructuredOutputsParams

    settings = [each for each in BATCHES[kind] if not (drafts and each.keys() & NOT_WITH_DRAFTS)]
    arrivals = []
    for number, setting in zip(range(size), itertools.cycle(settings)):
        params = {"max_tokens": TOKENS, "ignore_eos": True, **setting}
        if params.pop("structured_outputs", None):
            params["structured_outputs"] = StructuredOutputsParams(regex="parity")
        # Periodic, so that drafts are made from the first step on.
        prompt = [(7 * number + place % 3) % (VOCABULARY - 3) + 3 for place in range(9 + number)]
        arrivals.append(Arrival(f"{kind} {size} {number}", prompt, params))
    return arrivals


def main(model: Path, out: Path, name: str) -> None:
    """Run every batch in every size, then all kinds together."""
    compilations = Compilations()
    began = time.monotonic()
    engine = build_engine(
        generate(model),
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=max(SIZES),
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=64 << 20,
        **{"enforce_eager": False, **kinds.ENGINES[name]},
    )
    report: dict[str, Any] = {"seconds": time.monotonic() - began, "start": compilations.take()}
    drafts = "ngram" in name
    assert parity.install(engine)
    late: dict[str, list[str]] = {}
    for kind, size in itertools.product(BATCHES, SIZES):
        if not (batch := requests(kind, size, drafts)):
            continue
        run_requests(engine, batch)
        if names := compilations.take():
            late[f"{kind} {size}"] = names
    mixed = [
        Arrival(f"mixed {each.name}", each.prompt, each.params, step=3 * number)
        for number, each in enumerate(
            each for kind in BATCHES for each in requests(kind, 5, drafts)
        )
    ]
    run_requests(engine, mixed)
    if names := compilations.take():
        late["mixed"] = names
    out.write_text(json.dumps({**report, "late": late}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
