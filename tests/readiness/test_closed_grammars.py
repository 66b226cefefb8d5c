"""The fix closed-grammars: a complete grammar ends its request, whatever its min_tokens.

The pinned code leaves such a request no token, which is asserted as well: with the fix off ours
does so, too.
"""

from typing import Any

import pytest
import torch
from readiness.test_row_state import own_processors
from support import batches, grammars, modules
from support.grammars import EOS, likings, tokens
from support.scheduling import VOCABULARY
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

FIX = "closed-grammars"
UTILS = "vllm/v1/core/sched/utils.py"
MINIMUM = 4
SEVEN = {"choice": ["7"]}
SEVENS = {"grammar": 'root ::= "7"+'}
EAGER = likings(EOS, *tokens("7"))
#: What the front end is asked for: request to its grammar and parameters.
Asked = dict[str, tuple[dict[str, Any] | None, dict[str, Any]]]


def batch_of(side: str) -> Any:
    """Make a side's batch, with vLLM's own logits processors."""
    return batches.empty(modules.of_side(side), VOCABULARY, logitsprocs=own_processors())


def outputs_of(side: str, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Generate with a side's scheduler and batch, for requests that would rather end."""
    load = modules.of_side(side)
    module = load(grammars.SCHEDULER)
    monkeypatch.setattr(module, "check_stop", load(UTILS).check_stop)
    scheduler = grammars.make_scheduler(module.Scheduler)
    for name, (grammar, params) in asked.items():
        grammars.add(scheduler, name, grammar, {"max_tokens": 8, **params})
    return grammars.generate(scheduler, batch_of(side), dict.fromkeys(asked, EAGER), 10)


@pytest.mark.parametrize(
    ("grammar", "ends"),
    [(SEVEN, "7"), ({"json": {"type": "boolean"}}, "false"), ({"json": {"const": 17}}, "17")],
)
def test_a_complete_grammar_ends_its_request_without_an_error(
    side: str, grammar: Any, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Asked = {"a": (grammar, {"min_tokens": 7})}
    given, reason = outputs_of(side, asked, monkeypatch)["a"]
    if side == "ours":
        assert (given, reason) == ([*tokens(ends), EOS], "stop")
    else:
        assert (given, reason) == ([*tokens(ends), 0], "error")


def test_others_keep_their_min_tokens(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Asked = {
        "no grammar": (None, {"min_tokens": MINIMUM}),
        "a grammar that goes on": (SEVENS, {"min_tokens": MINIMUM}),
        "no minimum": (SEVEN, {}),
    }
    if side == "ours":  # elsewhere it would end with an error
        asked["a complete grammar"] = (SEVEN, {"min_tokens": MINIMUM})
    right = {
        name: (tokens("7") * (1 if grammar == SEVEN else MINIMUM) + [EOS], "stop")
        for name, (grammar, _) in asked.items()
    }
    assert outputs_of(side, asked, monkeypatch) == right


def filled(side: str) -> Any:
    """A batch of five requests, of which two have both a grammar and a minimum."""
    batch = batch_of(side)
    both = {"min_tokens": MINIMUM, "stop_token_ids": [EOS, 9]}
    grammar = {"structured_outputs": StructuredOutputsParams(choice=["7"])}
    for number, params in enumerate([{}, both, both | grammar, grammar, both | grammar]):
        batch.add_request(batches.state(batches.Spec([1], [], params), f"r{number}"))
    batch.refresh_metadata()
    return batch


def min_tokens(batch: Any) -> Any:
    """Return a batch's processor of min_tokens."""
    (processor,) = (
        each
        for each in batch.logitsprocs.non_argmax_invariant
        if isinstance(each, MinTokensLogitsProcessor)
    )
    return processor


def only(*allowed: int) -> torch.Tensor:
    """[vocab] logits of which only these are finite."""
    logits = torch.full((VOCABULARY,), -torch.inf)
    logits[list(allowed)] = 1.5
    return logits


@pytest.mark.parametrize("drafts", [None, [2, 1, 0, 3, 2], [0, 1, 2, 1, 3]])
def test_only_what_would_be_empty_is_left_as_it_was(side: str, drafts: list[int] | None) -> None:
    batch = filled(side)
    generator = torch.Generator().manual_seed(3)
    rows = {"r1": 1, "r2": 2, "r4": 4}
    for _ in range(20):
        count = 5 if drafts is None else sum(drafts)
        kinds = (only(EOS), only(9, EOS), only(5), only(5, EOS), only())
        chosen = torch.randint(len(kinds), (count,), generator=generator).tolist()
        before = torch.stack([kinds[kind] for kind in chosen])
        processor, logits = min_tokens(batch), before.clone()
        if drafts is None:
            processor.apply(logits)
            owners = list(range(5))
        else:
            processor.apply_with_spec_decode(logits, drafts)
            owners = [row for row, number in enumerate(drafts) for _ in range(number)]
        for owner, old, new in zip(owners, before, logits, strict=True):
            masked = old.clone()
            if owner in rows.values():
                masked[[EOS, 9]] = -torch.inf
            left = side == "ours" and owner in (2, 4) and bool(masked.isneginf().all())
            assert torch.equal(new, old if left else masked)


def test_a_processor_of_the_user_is_left_alone() -> None:
    class Derived(MinTokensLogitsProcessor):  # type: ignore[misc]
        """A processor that is not upstream's own."""

    batch = batch_of("pinned")
    min_tokens(batch).__class__ = Derived
    batches.empty(modules.overlaid, VOCABULARY, logitsprocs=batch.logitsprocs)
    assert type(min_tokens(batch)) is Derived
