"""The fix aborted-parents: aborting a request with several sequences leaves no state behind.

The pinned output processor keeps the parent, which is asserted as well: with the fix off ours does.
"""

from copy import copy
from typing import Any

import pytest
from support import modules
from support.logprobs import make_request
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

FIX = "aborted-parents"
PROCESSOR = "vllm/v1/engine/output_processor.py"
COUNT = 3
KINDS = pytest.mark.parametrize("kind", [*RequestOutputKind])
QUEUED = pytest.mark.parametrize("queued", [False, True])


class FrontEnd:
    """An output processor with one request of several sequences."""

    def __init__(self, side: str, kind: RequestOutputKind, queued: bool) -> None:
        load = modules.of_side(side)
        self.processor: Any = load(PROCESSOR).OutputProcessor(tokenizer=None, log_stats=False)
        params = SamplingParams(n=COUNT, detokenize=False, output_kind=kind)
        request = make_request("client", params)
        request.request_id = "client-internal"
        self.queue = RequestOutputCollector(kind, request.request_id) if queued else None
        parent = ParentRequest(request)
        self.children = []
        for index in range(COUNT):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.processor.add_request(child, None, parent, index, self.queue)
            self.children.append(child.request_id)

    def end(self, child: str) -> Any:
        """Process the last output of a child, and return the outputs without a queue."""
        output = EngineCoreOutput(child, [5], finish_reason=FinishReason.LENGTH)
        return self.processor.process_outputs([output]).request_outputs

    def left(self) -> list[int]:
        """Return how many parents, requests and names the processor has."""
        processor = self.processor
        kept = processor.parent_requests, processor.request_states, processor.external_req_ids
        return [len(each) for each in kept]


@KINDS
@QUEUED
@pytest.mark.parametrize("ended", range(COUNT))
@pytest.mark.parametrize(("name", "internal"), [("client", False), ("client-internal", True)])
def test_an_abort_by_name_leaves_nothing(
    side: str, kind: RequestOutputKind, queued: bool, ended: int, name: str, internal: bool
) -> None:
    """Some sequences have ended before. Stock drops a parent that it is given itself."""
    front = FrontEnd(side, kind, queued)
    for child in front.children[:ended]:
        front.end(child)
    aborted = front.processor.abort_requests([name], internal=internal)
    assert sorted(aborted) == front.children[ended:]
    assert front.left() == [int(side != "ours" and not internal), 0, 0]


@KINDS
@QUEUED
@pytest.mark.parametrize("ends", [False, True])
def test_the_last_of_its_sequences_leaves_nothing(
    side: str, kind: RequestOutputKind, queued: bool, ends: bool
) -> None:
    """It is aborted as the others are, or ends by itself."""
    front = FrontEnd(side, kind, queued)
    *others, last = front.children
    for child in others:
        front.processor.abort_requests([child], internal=True)
    assert front.left() == [1, 1, 1]
    if ends:
        front.end(last)
    else:
        front.processor.abort_requests([last], internal=True)
    # Without a queue, stock's abort does not take a child from its parent.
    assert front.left() == [int(side != "ours" and not (ends and queued)), 0, 0]


@pytest.mark.parametrize("aborted", [0, COUNT - 1])
def test_the_final_output_has_each_aborted_sequence(aborted: int) -> None:
    """Without a queue."""
    front = FrontEnd("ours", RequestOutputKind.FINAL_ONLY, queued=False)
    front.processor.abort_requests([front.children.pop(aborted)], internal=True)
    *_, (final,) = [front.end(child) for child in front.children]
    reasons = ["length"] * COUNT
    reasons[aborted] = "abort"
    assert [output.finish_reason for output in final.outputs] == reasons


@KINDS
def test_the_final_output_is_stocks(kind: RequestOutputKind) -> None:
    """An abort delivers what it delivers on stock."""
    delivered = []
    for side in ("pinned", "ours"):
        front = FrontEnd(side, kind, queued=True)
        front.end(front.children[0])
        front.processor.abort_requests(["client"], internal=False)
        queue: Any = front.queue
        delivered.append(repr(queue.get_nowait()))
    assert delivered[0] == delivered[1]
    assert "abort" in delivered[0]
