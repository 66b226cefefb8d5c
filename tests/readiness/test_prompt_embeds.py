"""The fix prompt-embeds: with drafts in flight, every position behind a prompt is a token's."""

import pytest
from support import modules
from support.inputs import DRAFTS, Row, Step, make
from vllm.v1.readiness.engine.switch import NAME

#: The end of a prompt, a first step with drafts, and a later one, whose position counts the drafts
#: of the step before as accepted.
STEP = Step(
    [Row(5, 0, 3, 2, known=False), Row(4, 1, 4, 1, DRAFTS), Row(4, 2, 5 + DRAFTS, 1, DRAFTS)],
    previous=[0, 1, 2],
    drafted=[1, 2],
    embeds=True,
)


@pytest.mark.parametrize(
    ("side", "value", "marked"),
    [
        ("pinned", "", False),
        ("off", "-prompt-embeds", False),
        ("ours", "-features", True),
        ("ours", "on", True),
    ],
)
def test_positions_behind_a_prompt_of_embeddings_are_marked(
    side: str, value: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model reads an embedding that another step left wherever a mark is missing."""
    monkeypatch.setenv(NAME, value)
    runner, scheduled, lengths = make(modules.of_side(side), STEP, value)
    runner.use_async_spec_decode = True
    runner.input_batch.is_token_ids[:] = False
    runner._prepare_inputs(scheduled, lengths)
    flags = runner.is_token_ids.np[: sum(lengths)].tolist()
    assert flags == [False] * 2 + [marked] * 2 * (1 + DRAFTS)
