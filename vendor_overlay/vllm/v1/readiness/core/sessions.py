"""Fix ``sessions``: the turns of a streaming session begin where the one before has ended.

A session (streaming input) goes on with a new prompt when its answer has ended. It keeps its KV
cache, and drops the last token of the answer. In 0.22.0 it goes on at once, though

- under asynchronous scheduling a step with the session is still in flight. Its tokens are added
  to the new turn, an assert or an unexpected status ends the engine for all clients
  (https://github.com/vllm-project/vllm/issues/52693), or a turn is answered twice;
- how much is kept is read from the number of computed tokens. That counts the step in flight, and
  drafts behind the end of the answer, so that tokens of the new prompt are never computed. After
  a preemption it is 0, and the session loses its whole history, or its place in the queue;
- a block of tokens that ends with the dropped one keeps its hash. Other requests find it under
  that hash in the prefix cache, with the keys and values of another token;
- each turn has the first one's ``max_tokens``.

Here a turn waits until no step with its session is in flight, and all but the answer's last
token is kept.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output

from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate

#: The scheduler's attribute for its :class:`_Turns`.
_TURNS = "readiness_turns"


class _Turns:
    """The sessions of one scheduler whose answer has ended in a step with others behind it."""

    def __init__(self, kind: "type[Scheduler]") -> None:
        self.on = registry.SESSIONS in switch.enabled() and subclasses.ends_in_seam(
            kind, "update_from_output"
        )
        #: The newest step that has requests.
        self.newest: SchedulerOutput | None = None
        #: Each session, and the step that is to arrive before it goes on.
        self.held: dict[str, tuple[Request, SchedulerOutput | None]] = {}
        #: The session that is going on.
        self.resumed: Request | None = None


def _of(scheduler: "Scheduler") -> _Turns:
    return subclasses.remembered(scheduler, _TURNS, lambda: _Turns(type(scheduler)))


def scheduled(scheduler: "Scheduler", step: "SchedulerOutput") -> None:
    """Note that a step has been scheduled."""
    if step.total_num_scheduled_tokens:
        _of(scheduler).newest = step


def hold(scheduler: "Scheduler", session: "Request") -> bool:
    """Keep a session whose answer has ended from going on, if a step with it may be in flight.

    It stays finished, so that the scheduler skips what arrives for it.

    Returns:
        True if it is held until :func:`resume`; False to fall back to upstream.
    """
    turns = _of(scheduler)
    settled = not session.num_output_placeholders and session.num_computed_tokens
    if settled or not turns.on or turns.resumed is session:
        return False
    turns.held[session.request_id] = (session, turns.newest)
    return True


def resume(scheduler: "Scheduler", step: "SchedulerOutput") -> None:
    """Let the sessions go on that were held for a step which has arrived."""
    turns = _of(scheduler)
    for name, (session, last) in [*turns.held.items()]:
        if last is not step:
            continue
        del turns.held[name]
        session.num_output_placeholders = 0
        turns.resumed = session
        if scheduler._handle_stopped_request(session):
            scheduler._free_request(session)
        turns.resumed = None


def release(scheduler: "Scheduler", names: "Iterable[str]") -> None:
    """Give up sessions that are held: they are being aborted."""
    turns = _of(scheduler)
    for name in [name for name in turns.held if name in names]:
        session, _ = turns.held.pop(name)
        session.status = type(session.status).PREEMPTED  # else upstream takes it for finished


def kept(scheduler: "Scheduler", session: "Request", update: "StreamingUpdate") -> int:
    """How many of a session's tokens remain as it goes on.

    Returns:
        All but the last of its answer; upstream's number with the fix off.
    """
    end: int = session.num_computed_tokens
    if not _of(scheduler).on:
        return end
    end = session.num_tokens - bool(session.num_output_tokens)
    session.num_computed_tokens = min(session.num_computed_tokens, end)
    session.spec_token_ids = []
    session.max_tokens = update.max_tokens
    del session.block_hashes[end // scheduler.kv_cache_manager.block_pool.hash_block_size :]
    return end
