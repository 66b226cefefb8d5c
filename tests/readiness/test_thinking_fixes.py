"""The fixes of thinking budgets, by what requests are forced to in a batch that changes.

Upstream's holder with the fixes and the feature's make the same decisions, and a plain reading of
each request's tokens says what these are. That ours decides as upstream does without the fixes is
tested in test_thinking_budget.
"""

import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import modules
from support.batches import Spec, empty, state
from support.examples import draws
from vllm.v1.readiness.engine import switch
from vllm.v1.readiness.sample.thinking_budget import ThinkingBudget
from vllm.v1.readiness.sample.thinking_fixes import FixedHolder
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

VOCABULARY = 8
ROWS = 4
START, END, WORD, STOP = 0, 1, 2, 3


class Batch:
    """An input batch, and its requests.

    Args:
        load: modules.pristine or modules.overlaid.
        value: of VLLM_READINESS.
        end: the end marker.
        drafts: draft tokens a request and step at most.
        start: the start marker.
    """

    def __init__(
        self,
        load: Any,
        value: str,
        end: Sequence[int] = (END,),
        drafts: int = 0,
        start: Sequence[int] = (START,),
    ) -> None:
        reasoning = SimpleNamespace(
            reasoning_start_token_ids=list(start), reasoning_end_token_ids=list(end)
        )
        with mock.patch.dict(os.environ, {switch.NAME: value}):
            self.batch = empty(
                load,
                VOCABULARY,
                max_num_reqs=ROWS,
                length=128,
                num_spec_tokens=drafts,
                reasoning_config=reasoning,
            )
        self.drafts = drafts
        self.requests: dict[str, Any] = {}

    @property
    def holder(self) -> Any:
        """The batch's state of thinking budgets."""
        return self.batch.thinking_budget_state_holder

    def join(self, name: str, prompt: list[int], budget: int | None, output: Any = ()) -> None:
        """A request is given a row."""
        spec = Spec(prompt, list(output), {"thinking_token_budget": budget})
        self.requests[name] = state(spec, name)
        self.batch.add_request(self.requests[name])

    def leave(self, name: str) -> Any:
        """A request leaves its row; the request."""
        self.batch.remove_request(name)
        return self.requests.pop(name)

    def cut(self, name: str, length: int) -> None:
        """An output is cut back."""
        if hasattr(self.batch, "readiness"):
            self.batch.readiness.cut(name, length)
        del self.requests[name].output_token_ids[length:]

    def refresh(self) -> None:
        """End the changes of a step."""
        self.batch.condense()
        self.batch.refresh_metadata()

    def swap(self, one: str, other: str) -> None:
        """Two requests change rows."""
        rows = self.batch.req_id_to_index
        self.batch.swap_states(rows[one], rows[other])

    def forced(self, drafts: dict[str, list[int]]) -> dict[str, dict[int, int]]:
        """Return what each request is forced to in a step, by position."""
        names = self.batch.req_ids
        specs = [drafts.get(name, []) for name in names]
        outputs = [self.requests[name].output_token_ids for name in names]
        places: list[tuple[str, int]] = [
            (name, position)
            for name, spec in zip(names, specs, strict=True)
            for position in range(len(spec))
        ]
        passes = [(True, [(n, len(s)) for n, s in zip(names, specs, strict=True)])]
        if places:
            passes.append((False, places))
        else:  # the rejection sampler has no part in the step
            passes = [(False, passes[0][1])]
            specs = [[] for _ in names]
        result: dict[str, dict[int, int]] = {name: {} for name in names}
        if not self.holder.has_tracked_requests():
            return result
        combined = [[*out, *spec] for out, spec in zip(outputs, specs, strict=True)]
        self.holder.update_state(combined, specs)
        for bonus, rows in passes:
            logits = torch.zeros(len(rows), VOCABULARY)
            self.holder.apply_to_logits(logits, bonus, specs)
            for row, token in logits.nonzero().tolist():
                name, position = rows[row]
                result[name][position] = token
        return result


#: Ours with the fixes off.
off = partial(Batch, modules.overlaid, "-fixes")
#: Ours with the fixes, and upstream's holder.
plain = partial(Batch, modules.overlaid, "-thinking-budget")
#: Ours with everything on.
ours = partial(Batch, modules.overlaid, "on")


def test_the_fixes_are_there_with_and_without_the_feature() -> None:
    assert type(off().holder) is ThinkingBudget
    assert type(plain().holder) is FixedHolder
    assert type(Batch(modules.overlaid, "off", [END], 0).holder) is ThinkingBudgetStateHolder
    assert type(Batch(modules.overlaid, "thinking-rows", [END], 0).holder) is FixedHolder


class Reading:
    """What a plain reading of a request's tokens says of its next step.

    Args:
        prompt: its prompt.
        start: the start marker.
        end: the end marker: one token, or any number of tokens without drafts.
        budget: its budget; None or -1 for none.
    """

    def __init__(
        self, prompt: list[int], start: list[int], end: list[int], budget: int | None
    ) -> None:
        self.prompt = prompt
        self.start = start
        self.end = end
        self.budget = budget
        #: The length of the output in the last step.
        self.length = 0

    def thought(self, output: list[int]) -> tuple[int | None, int | None]:
        """Return how long the section is that the output is in, and its part in the prompt.

        Returns:
            The number of its tokens, None if there is no section; how many are the prompt's,
            None if it did not begin there.
        """
        starts, ends = (
            [at for at in range(len(self.prompt)) if self.prompt[at : at + len(marker)] == marker]
            for marker in (self.start, self.end)
        )
        thought = prompts = None
        if starts and starts[-1] > max(ends, default=-1):
            thought = prompts = len(self.prompt) - len(self.start) - starts[-1]
        last = 0  # where the last marker ends
        for at in range(1, len(output) + 1):
            if thought is None:
                if output[max(last, at - len(self.start)) : at] == self.start:
                    thought, last = 0, at
            else:
                thought += 1
                if output[max(last, at - len(self.end)) : at] == self.end:
                    thought, prompts, last = None, None, at
        return thought, prompts

    def next(self, output: list[int], drafts: list[int]) -> dict[int, int]:
        """Return what the request is forced to in the next step, by position."""
        self.length = len(output)
        thought, prompts = self.thought(output)
        if thought is None or self.budget is None or self.budget == -1:
            return {}
        budget = self.budget
        if prompts is not None and prompts < budget:
            # Upstream takes it that the prompt's start marker is one token.
            budget += len(self.start) - 1
        if thought + len(drafts) < budget:
            return {}
        position = min(max(budget - thought, 0), len(drafts))
        # The end has been forced since the budget was used up, or since the prompt. Drafts may
        # exceed the budget if the section begins in them.
        forced = max(0, thought - max(budget, prompts or 0))
        return {position: self.end[forced if len(self.end) > 1 else 0]}


class Crowd:
    """A batch with both holders in turn, in step, and the reading of each of its requests.

    Args:
        start: the start marker.
        end: the end marker.
        drafts: draft tokens a request and step at most.
    """

    def __init__(self, start: list[int], end: list[int], drafts: int) -> None:
        self.start = start
        self.end = end
        self.batches = [plain(end, drafts, start), ours(end, drafts, start)]
        self.readings: dict[str, Reading] = {}
        self.away: list[Any] = []

    @property
    def requests(self) -> dict[str, Any]:
        """The requests in the batch."""
        return self.batches[0].requests

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of both batches; what they return."""
        return [getattr(batch, method)(*arguments) for batch in self.batches]

    def join(self, prompt: list[int], budget: int | None) -> None:
        """A new request joins."""
        name = f"r{len(self.readings)}"
        self.readings[name] = Reading(prompt, self.start, self.end, budget)
        self.add(name, [])

    def add(self, name: str, output: list[int]) -> None:
        """A request is given a row."""
        self.each("join", name, self.readings[name].prompt, self.readings[name].budget, output)

    def forced(self, drafts: dict[str, list[int]]) -> Any:
        """Return what each request is forced to, the same for all who say so."""
        first, second = self.each("forced", drafts)
        assert first == second
        for name, request in self.requests.items():
            assert first[name] == self.readings[name].next(request.output_token_ids, drafts[name])
        return first


TOKENS = st.sampled_from([START, START, END, STOP, WORD, WORD, WORD])


@given(data=st.data())
@draws(60)
@pytest.mark.parametrize(
    ("start", "end", "drafts"),
    [
        ([START], [END], 0),
        ([START], [END, STOP, END], 0),
        ([START, STOP], [END, STOP, END], 0),
        ([START], [END], 2),
    ],
)
def test_each_request_gets_its_own_budget_in_every_section(
    start: list[int], end: list[int], drafts: int, data: st.DataObject
) -> None:
    """Requests join, leave, come back, are moved, swapped and cut back."""
    draw: Any = data.draw
    crowd = Crowd(start, end, drafts)
    for _ in range(draw(st.integers(2, 14))):
        for name in [*crowd.requests]:
            if draw(st.integers(0, 7)) == 7:
                left = crowd.each("leave", name)
                crowd.away += left[: draw(st.integers(0, 1))]  # it comes back, or it has ended
        while crowd.away and draw(st.booleans()) and len(crowd.requests) < ROWS:
            request = crowd.away.pop()
            crowd.add(request.req_id, request.output_token_ids)
        while len(crowd.requests) < ROWS and draw(st.booleans()):
            budget = draw(st.sampled_from([None, None, -1, 0, 1, 2, 3, 5]))
            crowd.join(draw(st.lists(TOKENS, min_size=1, max_size=4)), budget)
        crowd.each("refresh")
        names = [*crowd.requests]
        if len(names) > 1 and draw(st.integers(0, 2)) == 2:
            crowd.each("swap", *draw(st.permutations(names))[:2])
            crowd.each("refresh")
        for name in names:
            length = crowd.readings[name].length
            if length > 0 and draw(st.integers(0, 9)) == 9:
                crowd.each("cut", name, draw(st.integers(0, length - bool(drafts))))
        # A request is drafted for when it has sampled a token.
        most = {name: drafts * bool(crowd.requests[name].output_token_ids) for name in names}
        specs = {name: draw(st.lists(TOKENS, max_size=most[name])) for name in names}
        forced = crowd.forced(specs)
        for name in names:
            tokens: list[int] = []
            for position in range(len(specs[name]) + 1):
                drafted = specs[name][position:][:1]
                token = draw(st.sampled_from([*drafted * 3, draw(TOKENS)]))
                tokens.append(forced[name].get(position, token))
                if tokens[-1:] != drafted:
                    break
            for batch in crowd.batches:
                batch.requests[name].output_token_ids.extend(tokens)
