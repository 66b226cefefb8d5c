"""A hybrid model on a GPU: the fixes uniform-decode, accepted-counts and draft-gates.

Its kernels compile for over a minute the first time.
"""

from typing import Any

import pytest
from gpu.kinds import ENVIRONMENT
from support.engine import Engine, Run
from support.sites import REPO

pytestmark = pytest.mark.gpu

PROGRAM = REPO / "tests" / "gpu" / "hybrid.py"
DRAFTS = 3


def serve(engine: Engine, *arguments: str, switch: str = "on") -> Any:
    """Run the program to its end; stock's first run compiles the kernels for the others."""
    return start(engine, *arguments, switch=switch).finish()


def start(engine: Engine, *arguments: str, switch: str = "on") -> Run:
    """Start the program, which remembers how its kernels are tuned: others round otherwise."""
    tuned = {"TRITON_CACHE_AUTOTUNING": "1"}
    environment = {**ENVIRONMENT, **tuned, "VLLM_READINESS": switch}
    return engine.start(PROGRAM, arguments, environment=environment)


def same(one: Any, other: Any) -> bool:
    """Whether two outputs have the same tokens, and logprobs but for rounding."""
    pairs = zip(one["logprobs"], other["logprobs"], strict=True)
    return one["tokens"] == other["tokens"] and all(
        abs(mine[0][1] - theirs[0][1]) < 0.01 for mine, theirs in pairs
    )


def gap(one: Any, other: Any) -> float:
    """The distance of the logprobs where two outputs first differ in a token; 0.0 if nowhere."""
    for place, (mine, theirs) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
        if mine != theirs:
            first, second = (float(of["logprobs"][place][0][1]) for of in (one, other))
            return abs(first - second)
    return 0.0


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_a_prompt_as_long_as_a_decode_is_read(engines: dict[str, Engine], drafts: int) -> None:
    """Without CUDA graphs there is no fault, and stock shows what is right.

    But for rows without drafts, which undrafted-rows mends in any mode.
    """
    right = serve(engines["stock"], "eager", str(drafts))["outputs"]
    sides = [("stock", "on"), ("overlaid", "-uniform-decode"), ("overlaid", "-undrafted-rows")]
    runs = [start(engines[side], "graphs", str(drafts), switch=switch) for side, switch in sides]
    stock, off, ours = (run.finish()["outputs"] for run in runs)
    assert all(same(ours[name], right[name]) for name in right)
    for wrong in (stock, off):
        assert not same(wrong["short alone"], right["short alone"])
    # With drafts, the others have as many tokens only if all their drafts are tried.
    assert drafts or not same(stock["short beside others"], right["short beside others"])


@pytest.mark.parametrize("model", ["bamba", "qwen3-next"])
def test_outputs_are_stocks_bit_for_bit(engines: dict[str, Engine], model: str) -> None:
    """Without the fixes, with and without drafts; stock runs first, and tunes the kernels."""
    words = ("many", model)
    modes = [("graphs", "0"), ("ahead", str(DRAFTS))]
    stock = [serve(engines["stock"], *mode, *words) for mode in modes]
    runs = [start(engines["overlaid"], *mode, *words, switch="-fixes") for mode in modes]
    for mode, theirs, run in zip(modes, stock, runs, strict=True):
        ours = run.finish()
        assert ours["outputs"] == theirs["outputs"], mode
        assert ours["steps"] == theirs["steps"], mode
        answers = {tuple(output["tokens"]) for output in theirs["outputs"].values()}
        assert len(answers) > len(theirs["outputs"]) / 2
    # How often a model repeats itself is its own affair; Bamba is known to.
    assert model != "bamba" or stock[1]["steps"] < stock[0]["steps"]


def test_drafts_change_no_token_where_requests_join_and_leave(engines: dict[str, Engine]) -> None:
    plain = serve(engines["overlaid"], "graphs", "0", "many")
    drafted = serve(engines["overlaid"], "ahead", str(DRAFTS), "many")
    differing = [
        name
        for name, output in plain["outputs"].items()
        if not same(drafted["outputs"][name], output)
    ]
    assert len(differing) <= 2, differing  # logits may nearly tie
    assert drafted["steps"] < plain["steps"]


def test_drafts_of_gated_delta_nets_have_their_own_gates(engines: dict[str, Engine]) -> None:
    """Where logits of bfloat16 nearly tie, replies part at logprobs that lie near each other.

    One of 48 was seen to part at 0.57 for a reason that is not known; with other gates, 25 did.
    """
    words = ("many", "qwen3-next")
    plain = serve(engines["overlaid"], "graphs", "0", *words)["outputs"]
    runs = [
        start(engines["overlaid"], "ahead", str(DRAFTS), *words, switch=switch)
        for switch in ("on", "-draft-gates")
    ]
    ours, off = (run.finish()["outputs"] for run in runs)
    far = [
        [name for name, output in plain.items() if gap(of[name], output) > 0.25]
        for of in (ours, off)
    ]
    assert len(far[0]) <= 2, far
    assert len(far[1]) >= 10, far
