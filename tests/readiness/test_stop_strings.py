"""The fix stop-strings: a reply is the same in whatever steps its tokens arrive.

The oracle is the pinned front end, given one token at a time and one stop string, the one that is
complete first. With several tokens or stop strings it goes wrong, as ours does with the fix off.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.logprobs import PROCESSOR, make_request
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason, detokenizer
from vllm.v1.outputs import LogprobsLists
from vllm.v1.readiness.engine import originals

FIX = "stop-strings"
TEXTS = ["<end>", "a", "b", "ab", "ba", "aab", "bab", "c"]
END = 0


@cache
def tokenizer() -> Any:
    """A tokenizer of few tokens, most of several characters."""
    made = Tokenizer(BPE({text: number for number, text in enumerate(TEXTS)}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def sent(name: str, tokens: list[int], position: int, reason: FinishReason | None) -> Any:
    """A step's output with consecutive logprobs, and the routed experts, of its tokens."""
    count = len(tokens)
    ids = np.array(tokens, np.int32).reshape(count, 1)
    values = -np.arange(position, position + count, dtype=np.float32).reshape(count, 1)
    return EngineCoreOutput(
        name,
        [*tokens],
        new_logprobs=LogprobsLists(ids, values, np.ones(count, np.int32)),
        finish_reason=reason,
        routed_experts=values,
    )


def reply(side: str, steps: list[list[int]], reason: FinishReason, **params: Any) -> dict[str, Any]:
    """The reply of a front end, all deltas together, and the requests to abort."""
    kind = params.setdefault("output_kind", RequestOutputKind.DELTA)
    interval = params.pop("interval", 1)
    load = modules.of_side(side)
    processor = load(PROCESSOR).OutputProcessor(
        tokenizer(), log_stats=False, stream_interval=interval
    )
    name = "a"
    processor.add_request(make_request(name, SamplingParams(logprobs=0, **params)), "prompt")
    whole: dict[str, Any] = {"text": "", "ids": [], "values": [], "aborts": []}
    position = 0
    for number, step in enumerate(steps, 1):
        last = number == len(steps)
        output = sent(name, step, position, reason if last else None)
        position += len(step)
        result = processor.process_outputs([output])
        whole["aborts"] += result.reqs_to_abort
        for (shown,) in (made.outputs for made in result.request_outputs):
            if kind != RequestOutputKind.DELTA:
                whole |= {"text": "", "ids": [], "values": []}
            whole["text"] += shown.text
            whole["ids"] += shown.token_ids
            values = [*shown.logprobs][-len(shown.token_ids) :]
            whole["values"] += [next(iter(value.values())).logprob for value in values]
            whole["sum"] = shown.cumulative_logprob
            whole["reason"] = shown.finish_reason, shown.stop_reason
            if shown.routed_experts is not None:
                whole["experts"] = shown.routed_experts.ravel().tolist()
        if not processor.request_states:
            break
    return whole


def first_stop(steps: list[list[int]], reason: FinishReason, **params: Any) -> dict[str, Any]:
    """The right reply: of each stop string alone, the one with the fewest characters to its end."""
    singles = [[token] for step in steps for token in step]
    best: tuple[float, dict[str, Any]] | None = None
    for stop in params.pop("stop"):
        alone = reply("pinned", singles, reason, stop=[stop], **params)
        end = float("inf")
        if alone["reason"][1] == stop:
            end = len(alone["text"])
            end += 0 if params.get("include_stop_str_in_output") else len(stop)
        if best is None or end < best[0]:
            best = end, alone
    assert best is not None
    alone = best[1]
    if best[0] < float("inf"):  # the request ends in the engine core too if it is its last token
        alone["aborts"] = None
    return alone


def split(tokens: list[int], lengths: list[int]) -> list[list[int]]:
    """Consecutive parts of these lengths, again and again."""
    parts: list[list[int]] = []
    while tokens:
        length = lengths[len(parts) % len(lengths)]
        parts.append(tokens[:length])
        tokens = tokens[length:]
    return parts


@pytest.fixture(params=["fast", "slow"])
def detokenizers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of upstream's detokenizers is used."""
    monkeypatch.setattr(detokenizer, "USE_FAST_DETOKENIZER", request.param == "fast")


@given(
    tokens=st.lists(st.integers(1, len(TEXTS) - 1), min_size=1, max_size=10),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    include=st.booleans(),
    minimum=st.integers(0, 4),
    kind=st.sampled_from(RequestOutputKind),
    interval=st.integers(1, 3),
    ends=st.booleans(),
)
@draws(200)
@pytest.mark.usefixtures("detokenizers")
def test_a_reply_does_not_depend_on_the_steps(
    tokens: list[int],
    lengths: list[int],
    stop: list[str],
    include: bool,
    minimum: int,
    kind: RequestOutputKind,
    interval: int,
    ends: bool,
) -> None:
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    params: dict[str, Any] = {
        "stop": stop,
        "include_stop_str_in_output": include,
        "min_tokens": minimum,
        "output_kind": kind,
        "interval": interval,
    }
    tokens += [END] if ends else []
    right = first_stop(split(tokens, [1]), reason, **params)
    ours = reply("ours", split(tokens, lengths), reason, **params)
    if right["aborts"] is None:
        right["aborts"] = ours["aborts"]
    assert ours == right


#: A step's tokens, the stop strings, and the right text, number of ids and stop.
CASES: list[tuple[str, list[str], list[str], str, int, str]] = [
    ("ids run past the stop", ["a", "c", "b", "a"], ["c"], "a", 2, "c"),
    ("the later of two", ["a", "c", "b", "ab"], ["b", "c"], "a", 2, "c"),
    ("the later of two in one token", ["a", "bab"], ["ba", "b"], "a", 2, "b"),
    ("a stop token behind", ["c", "b", "<end>"], ["c"], "", 1, "c"),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_known_cases(side: str, case: Any) -> None:
    _, texts, stop, text, count, stopped = case
    tokens = [TEXTS.index(each) for each in texts]
    reason = FinishReason.STOP if texts[-1] == "<end>" else None
    given = reply(side, [tokens], reason, stop=stop)
    right = (text, tokens[:count], ("stop", stopped))
    assert ((given["text"], given["ids"], given["reason"]) == right) == (side == "ours")
    assert len(given["values"]) == len(given["ids"])
    if side == "ours":
        assert given["experts"] == given["values"]


def test_steps_without_stop_strings_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    base = detokenizer.BaseIncrementalDetokenizer
    before = base.update

    def update(self: Any, tokens: list[int], stopped: bool) -> str | None:
        calls.append(len(tokens))
        return before(self, tokens, stopped)  # type: ignore[no-any-return]

    monkeypatch.setattr(base, "update", update)
    with monkeypatch.context() as patch:
        patch.setattr(originals, "all_vllms", lambda *_: True)  # the test's own replacement
        reply("ours", [[1, 2, 3], [4]], FinishReason.LENGTH)
        reply("ours", [[1], [2]], FinishReason.LENGTH, stop=["c"])
        assert calls == [3, 1, 1, 1]
        calls.clear()
        reply("ours", [[1, 2, 3], [4]], FinishReason.LENGTH, stop=["c"])
        assert calls == [1, 1, 1, 1]
    update.__module__ = base.__module__  # it has the module, but not the code
    calls.clear()
    reply("ours", [[1, 2, 3], [4]], FinishReason.LENGTH, stop=["c"])
    assert calls == [3, 1]
