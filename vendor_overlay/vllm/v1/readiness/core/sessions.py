"""Fix ``sessions``: a streaming session resumes exactly at the end of its last answer.

A streaming-input session resumes with a new prompt once its answer has ended. It keeps its KV
cache, and drops the last token of the answer. 0.22.0 resumes a session at once:

- under async scheduling, a step with the session is still in flight. The tokens of that step join
  the new turn, a turn is answered twice, or an assert or an unexpected status kills the engine
  (https://github.com/vllm-project/vllm/issues/52693);
- the session keeps ``num_computed_tokens`` tokens. This number includes in-flight tokens, and
  drafts beyond the answer, so some tokens of the new prompt are never computed. After a preemption
  the number is 0, and the session loses its earlier tokens or its position in the queue;
- a block that ends with the dropped token keeps its block hash. Other requests hit the block in the
  prefix cache, although it holds the KV of another token;
- every turn has the ``max_tokens`` of the first turn. A turn that ends by its length reports the
  stop token of an earlier turn (https://github.com/vllm-project/vllm/issues/57584).

Here a session resumes once no in-flight step includes it, and drops only its answer's last token.
"""

# mirrors: vllm.v1.core.sched.scheduler:Scheduler._update_request_as_session
# mirrors: vllm.v1.core.sched.scheduler:Scheduler._handle_stopped_request
# mirrors: vllm.v1.core.sched.scheduler:Scheduler.update_from_output

from functools import cached_property
from typing import TYPE_CHECKING

from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request, StreamingUpdate


class Sessions:
    """State of the fix for one scheduler."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        #: The newest step that has tokens.
        self._newest: SchedulerOutput | None = None
        #: Held sessions by request id, each with the step that must arrive before it resumes.
        self._held: dict[str, tuple[Request, SchedulerOutput | None]] = {}
        #: The session that :meth:`resume` is resuming.
        self._resumed: Request | None = None
        #: Sessions that have resumed, until their next step is scheduled.
        self._renewed: list[Request] = []

    @cached_property
    def _on(self) -> bool:
        return registry.SESSIONS in switch.enabled() and subclasses.ends_in_seam(
            type(self._scheduler), "update_from_output"
        )

    def scheduled(self, step: "SchedulerOutput") -> None:
        """Remember the newest step that has tokens; clear stop reasons of earlier turns."""
        for session in self._renewed:
            session.stop_reason = None
        self._renewed.clear()
        if step.total_num_scheduled_tokens:
            self._newest = step

    def hold(self, session: "Request") -> bool:
        """Hold a session whose answer has ended while its steps may be in flight; True if held.

        A held session keeps its finished status, so the scheduler skips its output.
        """
        settled = not session.num_output_placeholders and session.num_computed_tokens
        if settled or not self._on or self._resumed is session:
            return False
        self._held[session.request_id] = (session, self._newest)
        return True

    def resume(self, step: "SchedulerOutput") -> None:
        """Resume the sessions that were held until ``step`` arrived."""
        for name, (session, last) in [*self._held.items()]:
            if last is not step:
                continue
            del self._held[name]
            session.num_output_placeholders = 0
            self._resumed = session
            if self._scheduler._handle_stopped_request(session):
                self._scheduler._free_request(session)
            self._resumed = None

    def release(self, names: "Iterable[str]") -> None:
        """Release held sessions that are being aborted."""
        for name in [name for name in self._held if name in names]:
            session, _ = self._held.pop(name)
            session.status = type(session.status).PREEMPTED  # upstream skips finished requests

    def kept(self, session: "Request", update: "StreamingUpdate") -> int:
        """Return the number of tokens that a resuming session keeps, and update the session.

        The session keeps all tokens but the last of its answer. Its counts, drafts, block hashes
        and ``max_tokens`` are updated to match. The stop reason is cleared by :meth:`scheduled`, as
        the output of the ended turn is yet to be built. With the fix off, return upstream's number.
        """
        end: int = session.num_computed_tokens
        if not self._on:
            return end
        end = session.num_tokens - bool(session.num_output_tokens)
        session.num_computed_tokens = min(session.num_computed_tokens, end)
        session.spec_token_ids = []
        session.max_tokens = update.max_tokens
        self._renewed.append(session)
        pool = self._scheduler.kv_cache_manager.block_pool
        del session.block_hashes[end // pool.hash_block_size :]
        return end
