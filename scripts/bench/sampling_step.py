"""One sampling step for a feature, as the runner takes it, measured in this process.

    python -m bench.sampling_step OUT LOAD

LOAD is a :class:`Load` as JSON. OUT gets JSON: the device, and the times and digests of each
feature and case.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import thinking
from bench.compare import disturbance

if TYPE_CHECKING:
    import torch
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch


#: Case to where the start marker of thinking is; the other cases have none.
_STARTS = {"start in the output": 4, "start in the prompt": -8}
#: Feature to the cases of each output length.
FEATURES: Mapping[str, Sequence[str]] = {
    "penalties": ("",),
    "thinking": (*_STARTS, "no start"),
}
PROMPT = 128
#: Tokens below this are reserved for the markers of thinking.
RESERVED = 1 + max(*thinking.START, *thinking.END)


class Load(NamedTuple):
    """The features to measure, and the size of the batch.

    Attributes:
        what: names of features.
        device: "cpu" or "cuda".
        batch: requests.
        vocab: tokens.
        lengths: output lengths in tokens.
        steps: of each length.
    """

    what: Sequence[str]
    device: str
    batch: int
    vocab: int
    lengths: Sequence[int]
    steps: int

    def cases(self, feature: str) -> dict[str, tuple[int, str]]:
        """Return the cases of a feature: name to output length and kind."""
        return {
            f"{length:,} tokens{', ' * bool(case)}{case}": (length, case)
            for length in self.lengths
            for case in FEATURES[feature]
        }


def measure(load: Load) -> dict[str, Any]:
    """Measure the vLLM of this process; return the device, and feature to case to its result."""
    import torch
    from vllm.v1.sample.sampler import Sampler

    if load.device == "cpu":
        thinking.unpin()
    sampler = Sampler()
    with torch.inference_mode():
        results = {
            feature: {
                name: _measure(sampler, load, feature, length, case)
                for name, (length, case) in load.cases(feature).items()
            }
            for feature in load.what
        }
    device = torch.cuda.get_device_name() if load.device == "cuda" else "CPU"
    return {"device": device, "results": results}


def _measure(sampler: Sampler, load: Load, feature: str, length: int, case: str) -> dict[str, Any]:
    """Return the milliseconds a step at an output length, and digests of processed logits."""
    import torch

    generator = torch.Generator().manual_seed(length)
    steps = Steps(sampler, load, feature, length, case, generator)
    given = torch.randn((load.batch, load.vocab), generator=generator).to(load.device)
    synchronize = torch.cuda.synchronize if load.device == "cuda" else lambda: None
    logits = given.clone()
    for number in range(load.steps):  # warms up, and fills caches
        steps.step(number, logits)
    synchronize()
    steps.host = 0.0
    before = disturbance.snapshot()
    start = time.perf_counter()
    for number in range(load.steps, 2 * load.steps):
        steps.step(number, logits)
    synchronize()
    seconds = steps.host if feature == "thinking" else time.perf_counter() - start
    disturbed = disturbance.during((before, disturbance.snapshot()))
    # Once more, on fresh logits, to compare the sides.
    compared = [steps.step(0, given.clone())]
    if feature == "thinking":  # and while the budgets run out, one after the other
        near = Steps(sampler, load, feature, length, case, generator, near=True)
        compared += [near.step(number, given.clone()) for number in range(2 * load.steps)]
    digests = [hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest() for logits in compared]
    disturbed["gpus"] = disturbance.gpus() if load.device == "cuda" else None
    return {"ms": seconds / load.steps * 1e3, "logits": digests, "disturbance": disturbed}


class Steps:
    """A batch of requests with outputs of one length, and its steps.

    Attributes:
        host: seconds of the host so far, on the history and the logits.
    """

    def __init__(
        self,
        sampler: Sampler,
        load: Load,
        feature: str,
        length: int,
        case: str,
        generator: torch.Generator,
        near: bool = False,
    ) -> None:
        """Make the batch; ``near``: with thinking budgets that run out in these steps."""
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

        def random(*shape: int) -> torch.Tensor:
            return torch.randint(
                RESERVED, load.vocab, shape, generator=generator, dtype=torch.int32
            )

        self.sampler = sampler
        self.host = 0.0
        sampled = random(2 * load.steps, load.batch, 1)
        if near:  # some requests sample the end marker by themselves, others its first token
            sampled[:, 1::3] = thinking.END[0]
            sampled[:, 2::3] = torch.tensor(thinking.END * load.steps).view(-1, 1, 1)
        self.sampled = sampled.to(load.device)
        self.discarded = torch.zeros(load.batch, dtype=torch.bool, device=load.device)
        self.row_of = {f"r{row}": row for row in range(load.batch)}
        reasoning = thinking.config() if feature == "thinking" else None
        self.batch = InputBatch(
            max_num_reqs=load.batch,
            max_model_len=PROMPT + length + 2 * load.steps + 8,
            max_num_batched_tokens=8192,
            device=torch.device(load.device),
            pin_memory=load.device == "cuda",
            vocab_size=load.vocab,
            block_sizes=[16],
            kernel_block_sizes=[16],
            logitsprocs_need_output_token_ids=reasoning is not None,
            reasoning_config=reasoning,
        )
        for name, row in self.row_of.items():
            tokens = random(PROMPT + length).tolist()
            if case in _STARTS:
                start = PROMPT + _STARTS[case]
                tokens[start : start + len(thinking.START)] = thinking.START
            budget = max(0, length + row % (2 * load.steps) - 8) if near else 2 * length + PROMPT
            asked = {"thinking_token_budget": budget} if reasoning else {"presence_penalty": 1.5}
            request = CachedRequestState(
                req_id=name,
                prompt_token_ids=tokens[:PROMPT],
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, **asked),
                generator=None,
                block_ids=([],),
                num_computed_tokens=0,
                output_token_ids=tokens[PROMPT:],
            )
            self.batch.add_request(request)
        self.batch.refresh_metadata()
        self.live = getattr(self.batch, "readiness", None)

    def step(self, number: int, logits: torch.Tensor) -> torch.Tensor:
        """Process these logits in place, and sample the tokens drawn for this step.

        Args:
            number: of the step, from 0.
            logits: [batch, vocabulary] float32.
        """
        batch, live, sampled = self.batch, self.live, self.sampled[number]
        start = time.perf_counter()
        if live is not None:
            live.begin_step()
        batch.update_async_output_token_ids()
        if live is not None:
            live.prepare(logits, None)
        logits = self.sampler.apply_logits_processors(logits, batch.sampling_metadata, False)
        self.host += time.perf_counter() - start
        if live is not None:
            live.observe_sampled(sampled, self.discarded)
        batch.prev_req_id_to_index = dict(self.row_of)
        if live is None or not live.place(batch.max_model_len):
            _place(batch)
        batch.set_async_sampled_token_ids(*_copy(sampled))
        return logits


def _place(batch: InputBatch) -> None:
    """Write the placeholders of a step, row by row, as upstream's runner does."""
    for row, output_ids in enumerate(batch.req_output_token_ids):
        end = batch.num_tokens_no_spec[row]
        batch.token_ids_cpu[row, end] = -1
        batch.is_token_ids[row, end] = True
        batch.num_tokens_no_spec[row] = end + 1
        output_ids.append(-1)


def _copy(sampled: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy sampled tokens to the host; return the copy and its event."""
    import torch

    if not sampled.is_cuda:
        return sampled, SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    host = sampled.to("cpu", non_blocking=True)
    event = torch.Event()
    event.record()
    return host, event


if __name__ == "__main__":
    out, load = sys.argv[1:]
    Path(out).write_text(json.dumps(measure(Load(**json.loads(load)))))
