"""Front ends that are given logprobs: the pinned output processor, and the overlaid one."""

from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.readiness.frontend import logprob_messages
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from support import modules
from support.batches import Spec, empty, fill

PROCESSOR = "vllm/v1/engine/output_processor.py"
DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
#: Values of which some are no numbers, or come again.
VALUES = [float("nan"), -float("inf"), -0.0, -1.0, 1e-45, -0.1, 3.4e38]


@cache
def tokenizer() -> Any:
    """A tokenizer of single bytes: most characters take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({character: n for n, character in enumerate(alphabet)}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@cache
def tokens() -> list[int]:
    """Tokens of characters of one to four bytes."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("aé€😀")
    ids: list[int] = tokenizer().convert_tokens_to_ids([*"".join(text for text, _ in bytes_of)])
    return ids


def make_request(name: str, params: SamplingParams) -> EngineCoreRequest:
    """Return an engine core's request of three prompt tokens."""
    return EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def of_prompt(
    load: Any,
    prompt: list[int],
    runs: Iterable[tuple[int, int]],
    width: int,
    logits: torch.Tensor,
    sampler: Any,
    compute_logits: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> LogprobsTensors:
    """Compute the logprobs of a prompt by a real runner.

    Args:
        load: modules.pristine or modules.overlaid.
        prompt: its tokens.
        runs: the positions that each step computes, as pairs of begin and end.
        width: number of logprobs; -1 for all.
        logits: [positions, vocab], which the runner may not change.
        sampler: the runner's, or its logprobs_mode.
        compute_logits: the model's, which is given the logits.
    """
    vocabulary = logits.shape[1]
    batch = empty(load, vocabulary)
    fill(batch, [Spec(prompt, [], {})])
    request = SimpleNamespace(
        prompt_token_ids=prompt, in_progress_prompt_logprobs_cpu=None, num_computed_tokens=0
    )
    runner = object.__new__(load(modules.RUNNER).GPUModelRunner)
    vars(runner).update(
        input_batch=batch,
        requests={"r0": request},
        num_prompt_logprobs={"r0": vocabulary if width == -1 else width},
        device=torch.device("cpu"),
        use_async_scheduling=False,
        query_start_loc=SimpleNamespace(np=np.array([0, 0])),
        sampler=load(modules.SAMPLER).Sampler(sampler) if isinstance(sampler, str) else sampler,
        model=SimpleNamespace(compute_logits=compute_logits),
        _sync_device=lambda: None,
    )
    done: dict[str, Any] = {}
    for begin, end in runs:
        request.num_computed_tokens = begin
        with torch.compiler.set_stance("force_eager"):  # else it compiles every shape
            done = runner._get_prompt_logprobs_dict(logits[begin:end], {"r0": end - begin})
    shown: LogprobsTensors = done["r0"]
    return shown


class Wish(NamedTuple):
    """What a request asks for."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    kind: RequestOutputKind = DELTA
    flat: bool = False
    last: int = 9

    def request(self, name: str, text: bool) -> EngineCoreRequest:
        params = SamplingParams(
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            output_kind=self.kind,
            flat_logprobs=self.flat,
            detokenize=text,
        )
        return make_request(name, params)


class Step(NamedTuple):
    """A step: of each request as many positions as it has counts.

    Attributes:
        width: logprobs a position of the batch, the sampled token's included.
        kinds: types of ids, logprobs and ranks.
    """

    counts: list[int]
    width: int
    seed: int
    kinds: tuple[torch.dtype, torch.dtype] = (torch.int32, torch.float32)

    def tensors(self, positions: int, width: int) -> LogprobsTensors:
        random = np.random.default_rng(self.seed)
        ids = random.choice(tokens(), (positions, width))
        ids[:, 0] = np.take(tokens(), self.seed + np.arange(positions), mode="wrap")
        values = random.choice(VALUES, (positions, width))
        ranks = random.integers(1, 300, positions)
        return LogprobsTensors(
            torch.tensor(ids, dtype=self.kinds[0]).reshape(positions, width),
            torch.tensor(values, dtype=self.kinds[1]).reshape(positions, width),
            torch.tensor(ranks, dtype=self.kinds[0]),
        )


class Side:
    """A front end, and what its clients have been given."""

    def __init__(self, ours: bool, wishes: list[Wish], text: bool, interval: int = 1) -> None:
        module = modules.overlaid(PROCESSOR) if ours else modules.pristine(PROCESSOR)
        self.ours, self.wishes = ours, wishes
        self.given: list[Any] = []
        self._begun: set[int] = set()
        self.processor = module.OutputProcessor(
            tokenizer() if text else None, log_stats=False, stream_interval=interval
        )
        for row, wish in enumerate(wishes):
            self.processor.add_request(wish.request(str(row), text), "prompt")
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        if ours:
            logprob_messages.quicken(self.decoder)

    def outputs(self, number: int, step: Step) -> EngineCoreOutputs:
        """Make what the engine core gives for a step."""
        counts = [count for count, _ in zip(step.counts, self.wishes, strict=False)]
        starts = [0, *np.cumsum(counts).tolist()]
        lists = step.tensors(starts[-1], step.width).tolists(starts if {*counts} != {1} else None)
        outputs = []
        for row, (count, wish) in enumerate(zip(counts, self.wishes, strict=False)):
            if not count:  # a chunk of a prompt, of which nothing is shown
                continue
            prompt = None
            if row not in self._begun and wish.prompt_logprobs is not None:
                prompt = step.tensors(2, 9 if wish.prompt_logprobs < 0 else 4)
            self._begun.add(row)
            sliced = lists.slice_request(row, count) if wish.logprobs is not None else None
            outputs.append(
                EngineCoreOutput(
                    str(row),
                    [tokens()[0]] * count,
                    new_logprobs=sliced,
                    new_prompt_logprobs_tensors=prompt,
                    finish_reason=FinishReason.LENGTH if number == wish.last else None,
                )
            )
        return EngineCoreOutputs(outputs=outputs, timestamp=1.0)

    def take(self, number: int, step: Step, message: bool = False) -> None:
        """Take a step, whose outputs may come in a message."""
        outputs = self.outputs(number, step)
        if message:
            sent = outputs
            if self.ours:
                sent = logprob_messages.packed(outputs, self.encoder)
            outputs = self.decoder.decode(self.encoder.encode(sent))
        self.given += self.processor.process_outputs(outputs.outputs).request_outputs
