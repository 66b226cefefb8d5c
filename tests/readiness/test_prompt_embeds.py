"""The fix prompt-embeds: the model is given a request's own tokens behind its prompt."""

from random import Random

import pytest
from support import modules
from support.canaries import CanaryRun, Leak, Tenant
from vllm.sampling_params import SamplingParams


def leak(asynchronous: bool, **named: object) -> str | None:
    """Run a request whose prompt is embeddings, with drafts.

    Returns:
        What is read that is not the request's at that position; None if all is.
    """
    run = CanaryRun(Random(0), asynchronous, 2, **named)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    run.admit(tenant=Tenant(1, params, [3] * 6, [False] * 6, lora=0))
    try:
        run.finish()
    except Leak as found:
        return found.what
    assert run.accepted
    return None


@pytest.mark.parametrize(
    ("named", "given"),
    [
        ({"load": modules.pristine}, "drafted inputs"),
        ({"switch": "-prompt-embeds"}, "drafted inputs"),
        ({"switch": "-features"}, None),
        ({}, None),
    ],
    ids=["pinned", "off", "fixes only", "ours"],
)
def test_with_drafts_in_flight_the_model_is_given_each_requests_own_tokens(
    named: dict[str, object], given: str | None
) -> None:
    assert leak(True, **named) == given
