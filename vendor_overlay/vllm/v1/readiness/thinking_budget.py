"""Thinking budgets that read what is new, and wait only where a decision depends on it.

Upstream searches a request's whole output for the start and the end marker on every step
until each is found, and needs the newest token on the host for that. Here every decision
is still made by upstream's own ``_update_think_state``, but

- markers are searched in the tokens that have arrived since the last search, with an
  overlap of a marker's length less one;
- while the budget left exceeds what a step may bring, an update would only count down: it
  is left out, and made up for in one go before the next one that matters;
- an update whose tokens are still on their way, and which cannot force anything yet, is
  made when they arrive;
- only a step that may force the end marker, or may have to go on with it, waits.

Where upstream has two rows share one state, because it swapped a request that has a budget
with one that has none, both rows are searched whole and waited for, as upstream does it.

Lengths are in output tokens; a request's *reach* at a step is the length of its output and
the step's drafts together.
"""

from collections import Counter, deque
from collections.abc import Iterator
from sys import maxsize
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.readiness.feature import Feature
from vllm.v1.readiness.history import PLACEHOLDER
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

if TYPE_CHECKING:
    from vllm.v1.readiness.history import History
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu_input_batch import InputBatch

#: Token ids, row by row.
Lists = list[list[int]]
#: A reach that is never attained.
_NEVER = maxsize
#: What upstream takes for no budget at all.
_UNLIMITED = -1
#: A length that depends on how many drafts are accepted.
_OPEN = -1
#: The key of a request's :class:`_Progress` in upstream's state, with which it moves.
_PROGRESS = "readiness"


class _Searched:
    """The first tokens of an output, in which no marker is left to be found."""

    def __init__(self, output: list[int], length: int) -> None:
        self.output = output
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> list[int]:
        start, stop, step = index.indices(self.length)
        return self.output[start:stop:step]


class _Progress:
    """How far one request's output was searched and its updates were made.

    Attributes:
        output: the list that was searched.
        searched: how many of its tokens were.
        wake: the reach from which an update of ``output`` does more than count down; 0
            also where it is not to be skipped for another reason.
        limit: the reach from which it may force the end marker, if the start is known;
            _NEVER also where nothing will be forced any more.
        skipped: the length at the last update that was left out; None: none was left out,
            or _OPEN: it is known when the next step's tokens arrive.
        deferred: updates to be made when their tokens arrive: the length, or _OPEN, and
            the step's drafts.
        exact: make the next update at once, and search anew.
        shared: two rows share the state, as upstream leaves it when it swaps a request
            that has a budget with one that has none.
    """

    __slots__ = ("deferred", "exact", "limit", "output", "searched", "shared", "skipped", "wake")

    def __init__(self) -> None:
        self.output: list[int] | None = None
        self.searched = 0
        self.wake = 0
        self.limit = 0
        self.skipped: int | None = None
        self.deferred: deque[tuple[int, list[int]]] = deque()
        self.exact = True
        self.shared = False

    @property
    def seen(self) -> int:
        """The length that the last update which was put off was to see; 0: there is none."""
        return max(0, self.deferred[-1][0] if self.deferred else self.skipped or 0)

    def resolve(self, known: int) -> None:
        """The length that an update was to see is known now, if it was open."""
        if self.skipped == _OPEN:
            self.skipped = known
        if self.deferred and self.deferred[0][0] == _OPEN:
            self.deferred[0] = (known, self.deferred[0][1])

    def begin_anew(self) -> None:
        """Have the next update made at once, and search anew."""
        self.exact = True
        self.wake = 0


class ThinkingBudget(ThinkingBudgetStateHolder, Feature):  # type: ignore[misc]
    """Upstream's state holder for one live batch, with its history."""

    def __init__(
        self, batch: "InputBatch", history: "History", holder: ThinkingBudgetStateHolder
    ) -> None:
        self.__dict__.update(holder.__dict__)
        self.batch = batch
        self.history = history
        #: Each marker, by the name under which upstream's state keeps where it was found.
        self._markers = {
            "start_thinking": self.think_start_token_ids,
            "end_thinking": self.think_end_token_ids,
        }
        self._last = {marker[-1] for marker in self._markers.values() if marker}
        #: What there is to look at on every step, row by row.
        self._watched: list[tuple[int, dict[str, Any], _Progress]] = []
        self._deferring = False

    def sync_batch(self, batch_update: "BatchUpdate | None") -> None:
        """Requests join, leave and move; as upstream does it."""
        super().sync_batch(batch_update)
        if not batch_update:
            return
        rows = Counter(map(id, self._state.values()))
        self._watched = [
            (row, state, state.setdefault(_PROGRESS, _Progress()))
            for row, state in self._state.items()
        ]
        for _, state, progress in self._watched:
            shared = rows[id(state)] > 1
            if shared or progress.shared:
                progress.begin_anew()
            progress.shared = shared

    def cut(self, req_id: str, length: int) -> None:
        """Search an output anew if a cut loses tokens that may have been searched."""
        row = self.batch.req_id_to_index[req_id]
        state = self._state.get(row)
        if state is not None and length < self.history.known(row):
            state[_PROGRESS].begin_anew()

    def begin_anew(self) -> None:
        """Have the next updates made at once, and search anew."""
        for _, _, progress in self._watched:
            progress.begin_anew()

    def waiting(self) -> Iterator[int]:
        """The rows whose update in this step depends on tokens that may be on their way."""
        outputs = self.batch.req_output_token_ids
        drafts = self.batch.spec_token_ids
        for row, state, progress in self._watched:
            if row >= len(outputs):
                continue
            output = outputs[row]
            reach = len(output) + len(drafts[row])
            if reach < progress.wake and progress.output is output:
                continue
            if output and self._may_force(row, state, progress, reach):
                yield row

    def arrive(self, rows: list[int], tokens: list[int] | None) -> None:
        """Called when a step's tokens have been written into the lists.

        Args:
            rows: the requests that have got some.
            tokens: the one token that each has got; None: they may be more.
        """
        # A marker ends with a last token of one.
        if tokens is not None and not self._deferring and self._last.isdisjoint(tokens):
            return
        outputs = self.batch.req_output_token_ids
        for row in rows:
            state = self._state.get(row)
            if state is None:
                continue
            progress: _Progress = state[_PROGRESS]
            if progress.exact or progress.output is not outputs[row]:
                continue
            known = self.history.known(row)
            progress.resolve(known)
            # What no update was to see yet may be cut off before one does.
            self._search(state, progress, min(known, progress.seen))
            self._make_deferred(state, progress, known)
        self._deferring = any(progress.deferred for _, _, progress in self._watched)

    def update_state(
        self,
        output_token_ids: Lists,
        spec_token_ids: Lists | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Make the step's updates, or put them off; called once a step.

        Args:
            output_token_ids: the rows' outputs, with or without the step's drafts; the
                live batch's are read instead.
            spec_token_ids: the rows' drafts.
            repeat_indices: not used, as in 0.22.0's samplers.
        """
        outputs = self.batch.req_output_token_ids
        drafts = spec_token_ids or []
        guessed = self.history.drafted
        for row, state, progress in self._watched:
            if row >= len(outputs):
                continue
            output = outputs[row]
            specs = drafts[row] if row < len(drafts) else []
            length = len(output)
            reach = length + len(specs)
            unread = length > 0 and output[-1] == PLACEHOLDER
            if reach < progress.wake and progress.output is output:
                if progress.searched < length and not unread and progress.wake != _NEVER:
                    self._search(state, progress, length)
                progress.skipped = _OPEN if guessed and unread else length
            elif progress.limit == _NEVER:
                continue
            elif unread and not self._may_force(row, state, progress, reach):
                progress.deferred.append((_OPEN if guessed else length, list(specs)))
                progress.wake = 0
                self._deferring = True
            else:
                self._update(state, progress, output, specs)

    def apply_to_logits(
        self,
        logits: torch.Tensor,
        predict_bonus_token: bool,
        spec_token_ids: Lists | None,
    ) -> torch.Tensor:
        """Force the end marker where an update says so; as upstream does it.

        Args:
            logits: [positions, vocab] float32, changed in place.
            predict_bonus_token: whether the positions follow the step's drafts.
            spec_token_ids: the rows' drafts.

        Returns:
            ``logits``.
        """
        if any(state["in_end"] for state in self._state.values()):
            return super().apply_to_logits(logits, predict_bonus_token, spec_token_ids)
        return logits

    @staticmethod
    def _find_last_sequence_index(
        target_list: "list[int] | _Searched", token_ids: list[int]
    ) -> int:
        """Where upstream searches: prompts. What was generated has been searched."""
        if isinstance(target_list, _Searched):
            return -1
        return _find_last(target_list, token_ids, 0, len(target_list))

    def _may_force(self, row: int, state: dict[str, Any], progress: _Progress, reach: int) -> bool:
        """Whether an update that is not skipped may force a token, or go on with it."""
        budget: int = state["thinking_token_budget"]
        if progress.limit == _NEVER:
            return False
        if progress.exact or progress.output is not self.batch.req_output_token_ids[row]:
            return True
        if state["start_thinking"] != -1:
            return reach >= progress.limit
        # If the start marker is on its way, what follows it is on its way as well.
        return reach - self.history.known(row) > budget

    def _search(self, state: dict[str, Any], progress: _Progress, length: int) -> None:
        """Search what is new among an output's first tokens for the markers not yet found."""
        output = progress.output
        assert output is not None
        searched, progress.searched = progress.searched, max(length, progress.searched)
        if state["end_thinking"] != -1 and state["start_thinking"] != -1:
            return
        if self._last.isdisjoint(output[searched:length]):
            return
        unstarted = state["start_thinking"] == -1
        for name, marker in self._markers.items():
            if state[name] == -1:
                first = max(0, searched - len(marker) + 1)
                state[name] = _find_last(output, marker, first, length)
        if unstarted and progress.skipped is not None and progress.skipped < length:
            progress.skipped = None  # nothing counted before the start was found
        self._plan(state, progress)

    def _update(
        self, state: dict[str, Any], progress: _Progress, output: list[int], drafts: list[int]
    ) -> None:
        """Make this step's update; what was put off before it is made first."""
        length = len(output)
        if progress.output is not None:
            known = len(progress.output)  # which may be that of another row by now
            self._search(state, progress, min(known, progress.seen))
            self._make_deferred(state, progress, known)
        if progress.exact or progress.output is not output:
            self._make_skipped(state, progress)
            progress.output = output
            progress.searched = 0
            progress.exact = progress.shared
        self._search(state, progress, length)
        self._make(state, progress, length, drafts)
        if progress.exact:
            progress.wake = 0

    def _make_deferred(self, state: dict[str, Any], progress: _Progress, known: int) -> None:
        """Make the deferred updates whose tokens are known."""
        while progress.deferred and _OPEN < progress.deferred[0][0] <= known:
            length, drafts = progress.deferred.popleft()
            self._make(state, progress, length, drafts)
        if progress.deferred:
            progress.wake = 0

    def _make_skipped(self, state: dict[str, Any], progress: _Progress) -> None:
        """Make up for the updates that were skipped: they add up to one."""
        length, progress.skipped = progress.skipped, None
        if length is not None:
            self._run(state, progress, length, [])

    def _make(
        self, state: dict[str, Any], progress: _Progress, length: int, drafts: list[int]
    ) -> None:
        self._make_skipped(state, progress)
        self._run(state, progress, length, drafts)
        self._plan(state, progress)

    def _run(
        self, state: dict[str, Any], progress: _Progress, length: int, drafts: list[int]
    ) -> None:
        """Upstream's update, as of a length."""
        assert progress.output is not None
        state["output_tok_ids"] = _Searched(progress.output, length)
        state["spec_token_ids"] = list(drafts)
        state["in_spec_mode"] = self.in_spec_mode
        state["force_index"] = []
        self._update_think_state(state)

    def _plan(self, state: dict[str, Any], progress: _Progress) -> None:
        """Foresee when an update does more than count down, and when it may force."""
        budget = state["thinking_token_budget"]
        start, end = state["start_thinking"], state["end_thinking"]
        prompt = len(state["prompt_tok_ids"] or ()) if state["continue_thinking"] else 0
        over = not state["in_end"] and start != -1 and end != -1 and start <= end + prompt
        if over or budget == _UNLIMITED:
            # Upstream never looks for another start.
            progress.wake = progress.limit = _NEVER
        elif state["in_end"]:
            progress.wake = progress.limit = 0
        else:
            width = len(self.think_start_token_ids)
            counted = state["prev_output_length"]
            progress.wake = state["check_count_down"] + counted
            if not counted and not state["continue_thinking"]:
                # Upstream begins to count after the marker's width, wherever it is.
                progress.wake = progress.wake + width if start == -1 else 0
            progress.limit = budget + start + width - prompt


def _find_last(tokens: list[int], marker: list[int], first: int, end: int) -> int:
    """Where the last occurrence of a marker within ``tokens[first:end]`` begins, or -1."""
    found = -1
    if not marker:
        return found
    at = first + len(marker) - 1
    while True:
        try:
            at = tokens.index(marker[-1], at, end)
        except ValueError:
            return found
        begin = at + 1 - len(marker)
        if tokens[begin : at + 1] == marker:
            found = begin
        at += 1


def reads_lists(holder: "ThinkingBudgetStateHolder | None", otherwise: bool) -> bool:
    """Whether a thinking budget needs lists of each row's output with its drafts.

    Args:
        holder: the batch's state of thinking budgets, upstream's or ours.
        otherwise: what upstream makes of it.
    """
    return otherwise and not isinstance(holder, ThinkingBudget)
