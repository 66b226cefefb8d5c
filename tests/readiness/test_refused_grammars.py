"""The fix refused-grammars: what cannot be compiled ends its own request, and no other.

The pinned scheduler raises the error in its loop, as ours does with the fix off.
"""

import json
from concurrent.futures import Future
from typing import Any

import pytest
from support import grammars, modules
from vllm.v1.engine import FinishReason
from vllm.v1.readiness.core.preemption import StepsInFlight

FIX = "refused-grammars"
#: Each passes the front end of 0.22.0.
REFUSED: dict[str, dict[str, Any]] = {
    "an empty schema": {"json": ""},
    "an empty structural tag": {"structural_tag": ""},
    "no JSON object": {"json_object": False},
    "a token outside the vocabulary": {
        "structural_tag": json.dumps(
            {"type": "structural_tag", "format": {"type": "token", "token": 99999}}
        )
    },
}
HONEST = {"grammar": 'root ::= "t"+'}


def scheduler_of(side: str, bases: tuple[type, ...] = ()) -> Any:
    """Make a side's scheduler; with further bases, as AsyncScheduler has them."""
    load = modules.of_side(side)
    kind = load(grammars.SCHEDULER).Scheduler
    if bases:
        kind = type("Derived", (*bases, kind), {"__module__": "vllm.derived"})
    return grammars.make_scheduler(kind)


def step(scheduler: Any) -> list[Any]:
    """Run a step in which each request is given "t"; the outputs for client 0."""
    scheduled = scheduler.schedule()
    given = dict.fromkeys(scheduled.num_scheduled_tokens, grammars.tokens("t"))
    outputs = scheduler.update_from_output(scheduled, grammars.output_of(scheduled, given))
    return outputs[0].outputs if 0 in outputs else []


@pytest.mark.parametrize("bases", [(), (StepsInFlight,)])
@pytest.mark.parametrize("grammar", REFUSED.values(), ids=REFUSED)
def test_only_the_refused_request_ends(
    side: str,
    grammar: Any,
    bases: tuple[type, ...],
    caplog_vllm: pytest.LogCaptureFixture,
) -> None:
    scheduler = scheduler_of(side, bases)
    honest = grammars.add(scheduler, "honest", HONEST)
    step(scheduler)
    hostile = grammars.add(scheduler, "hostile", grammar)
    late = grammars.add(scheduler, "late", None)
    if side != "ours":
        with pytest.raises((RuntimeError, ValueError)):
            step(scheduler)
        return
    outputs = {output.request_id: output for output in step(scheduler)}
    refused = outputs.pop("hostile")
    assert (refused.finish_reason, refused.new_token_ids) == (FinishReason.ERROR, [])
    assert hostile.is_finished()
    (line,) = [line for line in caplog_vllm.messages if "hostile" in line]
    assert str(hostile.structured_output_request._grammar.exception()).strip() in line
    for others in (outputs.values(), step(scheduler)):
        assert {output.request_id for output in others} == {"honest", "late"}
        for output in others:
            assert (output.finish_reason, output.new_token_ids) == (None, grammars.tokens("t"))
    assert not (honest.is_finished() or late.is_finished() or scheduler.skipped_waiting)


@pytest.mark.parametrize("own", [(), (type("Own", (), {"update_from_output": None}),)])
def test_a_scheduler_with_an_update_of_its_own_is_left_to_upstream(own: tuple[type, ...]) -> None:
    """A mixin or a subclass may override update_from_output without calling ours."""
    base = modules.overlaid(grammars.SCHEDULER).Scheduler
    fields = {} if own else {"update_from_output": lambda *_: None}
    scheduler = grammars.make_scheduler(type("Derived", (*own, base), fields))
    grammars.add(scheduler, "hostile", REFUSED["an empty schema"])
    with pytest.raises((RuntimeError, ValueError)):
        scheduler.schedule()


def test_a_request_that_is_aborted_first_has_no_output() -> None:
    from vllm.v1.request import RequestStatus

    scheduler = scheduler_of("ours")
    grammars.add(scheduler, "hostile", REFUSED["an empty schema"])
    scheduled = scheduler.schedule()
    scheduler.schedule()  # as with two batches in flight
    scheduler.finish_requests("hostile", RequestStatus.FINISHED_ABORTED)
    outputs = scheduler.update_from_output(scheduled, grammars.output_of(scheduled, {}))
    assert not outputs[0].outputs
    assert not scheduler.requests


def test_a_grammar_that_fails_while_it_is_asked_for(side: str) -> None:
    class Late(Future):  # type: ignore[type-arg]
        """Fails as upstream begins to wait for it."""

        def result(self, timeout: float | None = None) -> Any:
            self.set_exception(ValueError("late"))
            return super().result(timeout)

    scheduler = scheduler_of(side)
    request = grammars.add(scheduler, "hostile", HONEST)
    request.structured_output_request.grammar = grammar = Late()
    if side != "ours":
        with pytest.raises(ValueError, match="late"):
            step(scheduler)
        return
    assert not step(scheduler)
    assert not request.is_finished()
    grammar.set_exception(ValueError("late"))
    assert step(scheduler)[0].finish_reason is FinishReason.ERROR
