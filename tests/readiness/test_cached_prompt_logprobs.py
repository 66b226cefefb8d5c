"""The fix cached-prompt-logprobs: prompts of which some positions were never computed.

The real runner computes the logprobs of a prompt's chunks, and the real front end takes them.
Memory that nobody has written holds NaN or the largest integer.
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from support import modules
from support.logprobs import PROCESSOR, make_request, of_prompt, tokenizer, tokens
from support.sampling import MODES
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.readiness.engine import switch
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.usefixtures("unwritten_memory_shows")

WORD = "cached-prompt-logprobs"
VOCABULARY = 256
PROMPT = (tokens() * 3)[:12]
#: Values of the switch with the fix on, and with it off.
ON = ("on", "fixes", WORD, "-readback", "-logprobs", "-readback,-logprobs", "-prompt-logits")
OFF = (f"-{WORD}", "off", f"-{WORD},-readback", f"-{WORD},-logprobs")
#: By what was cached, the runs of positions that are computed: pairs of begin and end.
COMPUTED: dict[str, Sequence[tuple[int, int]]] = {
    "nothing was cached": [(0, 12)],
    "a prefix": [(5, 12)],
    "a prefix, in chunks": [(4, 5), (5, 7), (7, 12)],
    "all but the last position": [(11, 12)],
    "a preempted prompt's rest": [(0, 3), (8, 9), (9, 12)],
    "a prefix, and a preempted prompt's rest": [(2, 4), (4, 6), (9, 12)],
    "a preempted prompt's end": [(0, 3), (11, 12)],
}


def computed(
    load: Any, runs: Sequence[tuple[int, int]], width: int, mode: str = MODES[0]
) -> LogprobsTensors:
    """Compute the logprobs of a prompt, a run of positions in each step, by a real runner."""
    logits = torch.randn((len(PROMPT), VOCABULARY), generator=torch.Generator().manual_seed(3))
    logits[:, 0] += 12  # token 0 is the likeliest, and has the logprob 0.0 or nearly
    return of_prompt(load, PROMPT, runs, width, logits.clone(), mode)


def given(
    load: Any,
    tensors: LogprobsTensors | None,
    width: int,
    kind: RequestOutputKind = RequestOutputKind.DELTA,
    flat: bool = False,
    text: bool = True,
    message: bool = True,
) -> list[Any]:
    """What a client is given of a prompt: by output, its logprobs."""
    params = SamplingParams(
        prompt_logprobs=width, output_kind=kind, flat_logprobs=flat, detokenize=text
    )
    request = make_request("r0", params)
    request.prompt_token_ids = PROMPT
    processor = load(PROCESSOR).OutputProcessor(tokenizer() if text else None, log_stats=False)
    processor.add_request(request, "prompt")
    shown = []
    for number in range(3):
        output = EngineCoreOutput(
            "r0",
            [tokens()[0]],
            new_prompt_logprobs_tensors=None if number else tensors,
            finish_reason=FinishReason.LENGTH if number == 2 else None,
        )
        outputs = EngineCoreOutputs(outputs=[output], timestamp=1.0)
        if message:
            sent = MsgpackEncoder().encode(outputs)
            outputs = MsgpackDecoder(EngineCoreOutputs).decode(sent)
        results = processor.process_outputs(outputs.outputs).request_outputs
        shown += [result.prompt_logprobs for result in results]
    return shown


def whole(runs: Sequence[tuple[int, int]], full: Any, flat: bool) -> Any:
    """All logprobs of a prompt, without those of positions that were not computed."""
    there = {position + 1 for run in runs for position in range(*run)}
    nothing: Any = {} if flat else None
    return [each if n in there else nothing for n, each in enumerate(full)]


@pytest.mark.parametrize(
    ("runs", "width", "mode"),
    [*zip(COMPUTED.values(), cycle([0, 3, -1]), cycle(MODES), strict=False)],
    ids=COMPUTED,
)
@pytest.mark.parametrize("value", ON)
def test_a_position_that_was_not_computed_has_no_logprobs(
    value: str,
    runs: Sequence[tuple[int, int]],
    width: int,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All others have what they have where all are computed, token 0 among them."""
    monkeypatch.setenv(switch.NAME, value)
    # Stock changes the logits that it returns, which the fix prompt-logits mends.
    stocks = modules.overlaid if mode.endswith("logits") else modules.pristine
    full = computed(stocks, [(0, 12)], width, mode)
    tensors = computed(modules.overlaid, runs, width, mode)
    for kind in RequestOutputKind:
        for flat, text, message in ((False, True, True), (True, True, False), (False, False, True)):
            shape = (width, kind, flat, text, message)
            stock = given(modules.pristine, full, *shape)
            ours = given(modules.overlaid, tensors, *shape)
            assert len(ours) == len(stock)
            for mine, theirs in zip(ours, stock, strict=True):
                assert type(mine) is type(theirs)
                expected = whole(runs, theirs, flat) if theirs else theirs
                assert repr(list(mine)) == repr(list(expected))


def test_a_rank_of_nan_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 0, as no token of the position is as likely."""
    full = computed(modules.overlaid, [(0, 12)], 1)
    full.logprobs[3] = float("nan")
    full.selected_token_ranks[3] = 0
    assert repr(given(modules.overlaid, full, 1)) == repr(given(modules.pristine, full, 1))


@pytest.mark.parametrize("runs", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("value", OFF)
def test_off_it_is_stocks(
    value: str, runs: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where anything is missing, a client is given memory, or the front end ends."""
    stock = computed(modules.pristine, runs, 2)
    monkeypatch.setenv(switch.NAME, value)
    ours = computed(modules.overlaid, runs, 2)
    cached = len(PROMPT) - 1 > sum(min(end, 11) - begin for begin, end in runs)
    assert (2**31 - 1 in stock.selected_token_ranks) is cached
    for mine, theirs in zip(ours[:3], stock[:3], strict=True):
        assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0))
    shown = [
        repr(given(load, stock, 2, text=False)) for load in (modules.pristine, modules.overlaid)
    ]
    assert shown[0] == shown[1]
    assert ("nan" in shown[0]) is cached


@pytest.mark.parametrize("count", [0, 1, 7, 11])
def test_the_last_positions_are_all_that_model_runner_v2_gives(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives nothing at all where the last position alone is computed."""
    full = computed(modules.pristine, [(0, 12)], 2)
    short = LogprobsTensors(*(tensor[11 - count :] for tensor in full[:3])) if count else None
    theirs = given(modules.pristine, full, 2)[0]
    assert given(modules.overlaid, short, 2)[0] == whole([(11 - count, 12)], theirs, False)
    monkeypatch.setenv(switch.NAME, f"-{WORD}")
    assert given(modules.overlaid, short, 2) == given(modules.pristine, short, 2)
    assert (given(modules.pristine, short, 2)[0] == theirs) is (count == 11)


def test_a_front_end_without_the_fix_is_given_no_other_requests_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing that reads as a probability."""
    tensors = computed(modules.overlaid, [(5, 12)], 2)
    assert tensors.selected_token_ranks.min() >= 1  # a lower one ends the Rust front end
    monkeypatch.setenv(switch.NAME, "off")
    for each in given(modules.overlaid, tensors, 2)[0][1:6]:
        assert [(token, one.logprob) for token, one in each.items()] == [(0, -float("inf"))]


def test_a_request_that_ends_before_its_first_token_is_given_nothing() -> None:
    request = make_request("r0", SamplingParams(prompt_logprobs=1))
    shown = []
    for load in (modules.pristine, modules.overlaid):
        processor = load(PROCESSOR).OutputProcessor(tokenizer(), log_stats=False)
        processor.add_request(request, "prompt")
        ended = EngineCoreOutput("r0", [], finish_reason=FinishReason.ERROR)
        (output,) = processor.process_outputs([ended]).request_outputs
        shown.append(output.prompt_logprobs)
    assert shown[0] == shown[1]
