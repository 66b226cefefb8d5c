"""The fix accepted-counts: each request of a hybrid model reads its own accepted drafts.

A count is 1 and the number of a request's drafts that its last step accepted. The pinned runner
has the faults: with the fix off ours has them.
"""

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.examples import draws
from support.hybrid import DRAFTS, MOMENTS, ROWS, HybridRunner

FIX = "accepted-counts"
Counts = dict[str, int]
Make = Callable[..., HybridRunner]
ours = partial(HybridRunner, modules.overlaid)


def begin(runner: HybridRunner, drafted: Counts, accepted: Counts) -> None:
    """Compute prompts, and a step with drafts."""
    assert set(runner.step(dict.fromkeys(drafted, 0)).values()) == {1}
    runner.sample({})
    assert set(runner.step(drafted).values()) == {1}
    runner.sample(accepted)


# Each returns the counts that the last step reads.


def exchanged(make: Make) -> Counts:
    """A new request takes the first row, and changes places with the last."""
    runner = make(mode="align", moment="before")
    begin(runner, {"a": 3, "b": 3, "c": 3}, {"a": 1, "b": 2, "c": 3})
    return runner.step({"b": 3, "c": 3, "new": 0}, finished=("a",))


def all_left(make: Make) -> Counts:
    """A new request takes the row of the only one before the count arrives."""
    runner = make(moment="after")
    begin(runner, {"a": 3}, {"a": 2})
    return runner.step({"new": 0}, finished=("a",))


@pytest.mark.parametrize("side", ["off", "ours"], indirect=True)
@pytest.mark.parametrize("own", [None, "_prepare_inputs", "_update_states_after_model_execute"])
@pytest.mark.parametrize("outcome", [exchanged, all_left])
def test_with_the_fix_off_or_a_method_of_its_own_a_runner_has_upstreams_counts(
    outcome: Callable[[Make], Counts], own: str | None, side: str
) -> None:
    counts = outcome(partial(ours, own=own))
    stocks = outcome(partial(HybridRunner, modules.pristine))
    assert (counts == stocks) == (own is not None or side == "off")


@given(data=st.data())
@draws(60)
@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_request_reads_its_own_count(
    asynchronous: bool, mode: str, data: st.DataObject
) -> None:
    """Requests join, finish, are left out and preempted; counts arrive at any moment."""
    runner = ours(asynchronous=asynchronous, mode=mode)
    expected: Counts = {}
    for number in range(data.draw(st.integers(2, 8))):
        runner.moment = data.draw(st.sampled_from(MOMENTS))
        finished = tuple(name for name in expected if data.draw(st.integers(0, 3)) == 0)
        for name in finished:
            del expected[name]
        known = [name for name in expected if data.draw(st.integers(0, 3))]
        preempted = tuple(
            name
            for name in known
            if name not in runner.batch.req_id_to_index and data.draw(st.booleans())
        )
        expected |= dict.fromkeys(preempted, 1)
        drafted = {name: data.draw(st.sampled_from([0, DRAFTS])) for name in known}
        drafted |= dict.fromkeys(preempted, 0)
        free = ROWS - len(expected)
        joining = data.draw(st.integers(min(free, not known), free))
        new = {f"r{number}.{n}": 0 for n in range(joining)}
        expected |= dict.fromkeys(new, 1)
        drafted |= new
        if not drafted:
            return
        assert runner.step(drafted, finished, preempted) == {n: expected[n] for n in drafted}
        accepted = {n: data.draw(st.integers(0, count)) for n, count in drafted.items()}
        runner.sample(accepted)
        expected |= {name: 1 + count for name, count in accepted.items()}
