"""Requests with grammars: the real scheduler, xgrammar, and the logits processors of a batch."""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output.utils import apply_grammar_bitmask

from support import batches
from support import scheduling as upstream

EOS = 2
_CHARACTERS = '0123456789{}[]":,aefilnorstux-. '
_TOKENS = {"<unk>": 0, "<s>": 1, "</s>": EOS} | {c: n for n, c in enumerate(_CHARACTERS, 3)}
SCHEDULER = "vllm/v1/core/sched/scheduler.py"


def tokens(text: str) -> list[int]:
    """The tokens of a text: one for each character."""
    return [_TOKENS[character] for character in text]


def tokenizer() -> Any:
    """Make the tokenizer."""
    made = Tokenizer(models.BPE(_TOKENS, [], unk_token="<unk>"))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_scheduler(kind: Any) -> Any:
    """Make a scheduler of a class, whose grammars are compiled in a thread, by xgrammar."""
    scheduler = upstream.make_scheduler(False, None, 64, 4, 64, 64, kind)
    manager = scheduler.structured_output_manager
    manager.tokenizer = tokenizer()
    manager.executor = ThreadPoolExecutor(1)
    return scheduler


_NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


def add(
    scheduler: Any,
    name: str,
    grammar: Mapping[str, Any] | None,
    params: Mapping[str, Any] = _NO_PARAMS,
    backend: str = "auto",
) -> Any:
    """Let the front end check a request, and add it; its grammar has been compiled, or failed.

    Args:
        scheduler: see :func:`make_scheduler`.
        name: the request's id.
        grammar: fields of StructuredOutputsParams.
        params: further sampling parameters.
        backend: the library of the grammar.
    """
    structured = None if grammar is None else StructuredOutputsParams(**grammar)
    sampling = SamplingParams(
        temperature=0.0, detokenize=False, structured_outputs=structured, **params
    )
    manager = scheduler.structured_output_manager
    config = StructuredOutputsConfig(backend=backend)
    sampling._validate_structured_outputs(config, manager.tokenizer)
    sampling.update_from_generation_config({}, EOS)
    request = Request(name, tokens("x"), sampling, None)
    manager.grammar_init(request)
    manager.executor.submit(int).result()  # behind the grammar, in the same thread
    scheduler.add_request(request)
    return request


def output_of(scheduled: Any, sampled: Mapping[str, list[int]]) -> Any:
    """The runner's output of a step: the tokens that each request was given."""
    names = list(scheduled.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: n for n, name in enumerate(names)},
        sampled_token_ids=[list(sampled[name]) for name in names],
    )


def likings(*favourites: int) -> torch.Tensor:
    """[1, vocab] logits that prefer tokens in this order, and then the others in theirs."""
    logits = -torch.arange(upstream.VOCABULARY, dtype=torch.float32)
    for rank, token in enumerate(favourites):
        logits[token] = 100.0 - rank
    return logits.unsqueeze(0)


def receive(results: dict[str, tuple[list[int], str | None]], outputs: Iterable[Any]) -> None:
    """Add a scheduler's outputs to each request's tokens and finish reason."""
    for output in outputs:
        given, _ = results[output.request_id]
        reason = output.finish_reason
        results[output.request_id] = (
            given + output.new_token_ids,
            None if reason is None else str(reason),
        )


def generate(
    scheduler: Any, batch: Any, wished: Mapping[str, torch.Tensor], steps: int
) -> dict[str, tuple[list[int], str | None]]:
    """Step a scheduler, and sample greedily as the runner does, under grammars and processors.

    Args:
        scheduler: with its requests.
        batch: empty.
        wished: request to its logits [1, vocab], the same at each step.
        steps: the most steps.

    Returns:
        Request to its tokens and finish reason.
    """
    results: dict[str, tuple[list[int], str | None]] = {name: ([], None) for name in wished}
    states: dict[str, Any] = {}
    for _ in range(steps):
        scheduled = scheduler.schedule()
        if not scheduled.num_scheduled_tokens:
            break
        for name in scheduled.finished_req_ids:
            batch.remove_request(name)
        for new in scheduled.scheduled_new_reqs:
            spec = batches.Spec(new.prompt_token_ids, [], {})
            states[new.req_id] = request = batches.state(spec, new.req_id)
            request.sampling_params = new.sampling_params
            batch.add_request(request)
        batch.condense()
        batch.refresh_metadata()
        logits = torch.cat([wished[name] for name in batch.req_ids])
        if (bitmask := scheduler.get_grammar_bitmask(scheduled)) is not None:
            apply_grammar_bitmask(scheduled, bitmask, batch, logits)
        for processor in batch.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        sampled = {name: [int(logits[row].argmax())] for row, name in enumerate(batch.req_ids)}
        for name, given in sampled.items():
            states[name].output_token_ids.extend(given)
        outputs = scheduler.update_from_output(scheduled, output_of(scheduled, sampled))
        receive(results, outputs[0].outputs)
    return results
