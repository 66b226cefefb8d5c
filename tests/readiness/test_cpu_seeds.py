"""The fix cpu-seeds: seeded requests on the CPU, in chunks and beside others.

For chunks, upstream's scheduler drives one runner: upstream's, ours with the fix off, or ours.
"""

import pytest
import torch
from support import modules
from support.lockstep import VOCABULARY, LockstepRun, RunnerUnderTest

FIX = "cpu-seeds"
SEED = 7
#: Tokens a step; the request's prompt takes some steps.
CHUNK = 4
PROMPT = [*range(1, 16)]


def states(side: str, asynchronous: bool, drafts: int) -> list[tuple[bool, torch.Tensor]]:
    """Prefill a seeded request in chunks, beside another that decodes.

    Returns:
        After each step whether its sample was dropped, and the state of its generator.
    """
    run = LockstepRun(
        asynchronous=asynchronous,
        drafts=drafts,
        max_num_seqs=2,
        max_tokens_a_step=CHUNK + 1 + drafts,
    )
    runner = run.stock if side == "pinned" else run.ours
    run.add([3], temperature=1.0, seed=1, max_tokens=30)
    step(run, runner)
    seeded = run.add(PROMPT, temperature=1.0, seed=SEED)
    after = []
    for _ in range(6):
        step(run, runner)
        row = runner.batch.req_id_to_index[seeded]
        dropped = bool(runner.runner.discard_request_mask.np[row])
        after.append((dropped, runner.batch.generators[row].get_state()))
    return after


def step(run: LockstepRun, runner: RunnerUnderTest) -> None:
    """Schedule a step, run it in one runner, and read its output."""
    scheduled = run.scheduler.schedule()
    output, copy = runner.step(scheduled, seed=1)
    tokens = copy.source.tolist()
    output.sampled_token_ids = [[id_ for id_ in row if 0 <= id_ < VOCABULARY] for row in tokens]
    run.scheduler.update_from_output(scheduled, output)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_dropped_sample_leaves_no_trace(side: str, asynchronous: bool, drafts: int) -> None:
    if side != "ours":
        with pytest.raises(RuntimeError, match="does not use offset"):
            states(side, asynchronous, drafts)
        return
    fresh = torch.Generator().manual_seed(SEED).get_state()
    after = states(side, asynchronous, drafts)
    assert sum(dropped for dropped, _ in after) >= 2
    assert not all(dropped for dropped, _ in after)
    assert all(torch.equal(state, fresh) == dropped for dropped, state in after)


def seeded_tokens(side: str, rows: list[int | None]) -> list[int]:
    """Sample a batch by its rows' seeds, None for none; the tokens of the rows with a seed."""
    sampler = modules.of_side(side)("vllm/v1/sample/ops/topk_topp_sampler.py").TopKTopPSampler()
    logits = torch.zeros(len(rows), 1000)
    generators = {
        row: torch.Generator().manual_seed(seed)
        for row, seed in enumerate(rows)
        if seed is not None
    }
    with torch.compiler.set_stance("force_eager"):  # compiling takes a minute
        tokens, _ = sampler.forward_cpu(logits, generators, None, None)
    return [int(tokens[row]) for row in generators]


def test_a_seed_counts_whoever_is_beside_it(side: str) -> None:
    alone = seeded_tokens(side, [SEED])
    beside = seeded_tokens(side, [None, SEED, None])
    assert (beside == alone) == (side == "ours")
    assert seeded_tokens(side, [1, SEED])[1:] == alone
