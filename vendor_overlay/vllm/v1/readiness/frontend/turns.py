"""Fix ``sessions`` in the front end: each turn has its own end, and an error ends the session.

0.22.0 hands each output of a streaming session to a collector with one place. If the client reads
late, the outputs of two turns are merged, and the first turn has no end. An error or an abort by
the engine counts as the end of a turn, although the engine has dropped the session: the client
waits for ever, or its next turn is served as a new session, without its history. A stream that
ends or fails before its first turn generates from a placeholder prompt
(https://github.com/vllm-project/vllm/pull/53861).

Here outputs of a later turn stay behind the unread end of the earlier one. An error or an abort
ends the session: its input is cancelled, its further turns are refused, and a turn on its way to
the engine is aborted. With several engines, all turns go to the engine of the first.
"""

# mirrors: vllm.v1.engine.output_processor:RequestOutputCollector
# mirrors: vllm.v1.engine.output_processor:OutputProcessor.process_outputs
# mirrors: vllm.v1.engine.output_processor:OutputProcessor._update_streaming_request_state
# mirrors: vllm.v1.engine.async_llm:AsyncLLM._add_streaming_input_request
# mirrors: vllm.v1.engine.core_client:DPLBAsyncMPClient

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.outputs import STREAM_FINISHED, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import subclasses, switch

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import (
        OutputProcessor,
        RequestOutputCollector,
        RequestState,
    )

#: Finish reasons with which the engine drops the session.
_ENDS = frozenset({FinishReason.ABORT, FinishReason.ERROR})


@dataclass(slots=True)
class Turns:
    """Turns of a session: the attribute ``readiness`` of its collector."""

    #: Outputs behind an unread end of a turn.
    later: deque[RequestOutput] = field(default_factory=deque)
    ended: bool = False  #: Whether the session has been ended.


def _is_on() -> bool:
    return registry.SESSIONS in switch.enabled()


def _of(collector: "RequestOutputCollector | None") -> Turns | None:
    """Return the turns of a collector; None if nothing was kept apart and nothing has ended."""
    turns: Turns | None = getattr(collector, subclasses.ATTRIBUTE, None)
    return turns


def keeps_apart(collector: "RequestOutputCollector", output: object) -> bool:
    """Keep an output of a later turn behind the unread ones; False to merge it as upstream."""
    unread, turns = collector.output, _of(collector)
    if not isinstance(unread, RequestOutput) or not isinstance(output, RequestOutput):
        return False
    later = turns.later if turns is not None else None
    last = later[-1] if later else unread
    ended = [each.index for each in last.outputs if each.finish_reason is not None]
    if ended and _is_on() and any(each.index in ended for each in output.outputs):
        subclasses.remembered(collector, Turns).later.append(output)
    elif later:
        last.add(output, aggregate=collector.aggregate)
    else:
        return False
    return True


def show_next(collector: "RequestOutputCollector") -> None:
    """Show the next turn's output, if any, once the one before has been read."""
    turns = _of(collector)
    if turns is not None and turns.later:
        collector.output = turns.later.popleft()
        collector.ready.set()


def continues(state: "RequestState", reason: FinishReason | None) -> bool:
    """Return whether a session continues behind an output; if not, it ends like a request.

    Behind a turn, the session extends copies: the outputs of the turn keep the lists.
    """
    if reason is None or not _is_on():
        return True
    if reason in _ENDS:
        end(state)
        state.streaming_input, state.input_chunk_queue = False, deque()
        return False
    state.prompt_token_ids = list(state.prompt_token_ids)
    state.detokenizer.token_ids = list(state.detokenizer.token_ids)
    processor = state.logprobs_processor
    if state.output_kind == RequestOutputKind.CUMULATIVE and processor.logprobs:
        processor.logprobs = processor.logprobs[:]
    return True


def is_dropped(state: "RequestState", reason: FinishReason) -> bool:
    """Return whether the engine has dropped a session whose input may still be on its way."""
    return state.input_chunk_queue is not None and reason in _ENDS and _is_on()


def end(state: "RequestState") -> None:
    """Cancel the input of a session that ends, and mark its collector; no-op for requests."""
    queue = state.queue
    if not state.streaming_input or queue is None or not _is_on():
        return
    subclasses.remembered(queue, Turns).ended = True
    task = queue._input_stream_task
    if task is not None and task is not asyncio.current_task(task.get_loop()):
        queue.close()  # a task that aborts its own session is not cancelled


def check(queue: "RequestOutputCollector | None") -> None:
    """Refuse a turn of a session that has ended.

    Raises:
        ValueError: the session has ended.
    """
    if (turns := _of(queue)) is not None and turns.ended:
        raise ValueError("The session has ended with an error or an abort.")


def is_open(processor: "OutputProcessor", queue: "RequestOutputCollector") -> bool:
    """Return whether the end of a session's input is to be sent: it has begun, and not ended.

    A stream without a turn has no output.
    """
    if queue.request_id in processor.request_states or not _is_on():
        return True
    if (turns := _of(queue)) is None or not turns.ended:
        queue.put(STREAM_FINISHED)
    return False


def engine_of(client: Any, request: "EngineCoreRequest") -> Any:  # noqa: ANN401
    """Return the engine that has the session of a turn; None if it is new."""
    return client.reqs_in_flight.get(request.request_id) if _is_on() else None
