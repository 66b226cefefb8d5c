"""Feature ``thinking-budget``: thinking budgets that search only new tokens, and rarely wait.

On every step, upstream searches a request's whole output for the start and the end marker until it
has found both, and needs the newest token on the host for that. Here upstream's
``_update_think_state`` still makes every decision, but

- markers are searched in tokens that have arrived since the last search, with an overlap of a
  marker's length less one;
- while the remaining budget exceeds the tokens that a step may add, an update would only count
  down: it is skipped, and one call replaces the skipped ones before the next update that matters;
- an update whose tokens have not arrived, and which cannot force a token yet, is deferred;
- only a step that may force the end marker, or continue to force it, waits.

Without ``thinking-rows``, upstream leaves two rows with one shared state when it swaps a request
that has a budget with one that has none. Both rows are then searched from the start and waited for,
as in upstream. With ``thinking-sections`` (:mod:`.thinking_fixes`) the search continues after a
section has ended, and nothing waits until another section may exceed the budget.

Lengths are in output tokens. A request's *reach* at a step is the length of its output plus the
number of its drafts in the step.
"""

# mirrors: vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from sys import maxsize
from typing import TYPE_CHECKING, Any, SupportsIndex
from weakref import proxy

import torch
from vllm.v1.readiness.feature import Feature, Live
from vllm.v1.readiness.outputs.history import PLACEHOLDER, History
from vllm.v1.readiness.sample.thinking_fixes import (
    ATTRIBUTES,
    KEYS,
    UNLIMITED,
    FixedHolder,
    Lists,
    SearchedOutput,
    find_last,
)
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu_input_batch import InputBatch

#: A reach that no request attains.
_NEVER = maxsize
#: A length that depends on the number of accepted drafts.
_OPEN = -1
#: Key of a request's :class:`_Progress` in upstream's state, so that they move together.
_PROGRESS = "readiness"
#: Attributes of :class:`ThinkingBudget` that upstream's holder lacks.
_OWN = {"batch", "history", "_markers", "_tracked", "_any_deferred"}


@dataclass(slots=True, eq=False)
class _Progress:
    """Progress of one request's search and updates."""

    output: list[int] | None = None  # the list that has been searched
    searched: int = 0  # number of its tokens searched
    #: Reach from which an update does more than count down; 0 if the next must not be skipped.
    update_from: int = 0
    #: Reach from which an update may force the end marker of a known start; _NEVER for never.
    force_from: int = 0
    #: Output length at the last skipped update; _OPEN if its tokens have not arrived.
    skipped: int | None = None
    #: Updates awaiting their tokens: the length, or _OPEN, and the step's drafts.
    deferred: deque[tuple[int, list[int]]] = field(default_factory=deque)
    restart: bool = True  # the next update is immediate, after a search from the start
    shared: bool = False  # two rows share the state

    @property
    def pending_length(self) -> int:
        """Length at the newest skipped or deferred update; 0 if it is open or there is none."""
        return max(0, self.deferred[-1][0] if self.deferred else self.skipped or 0)

    @property
    def updated(self) -> int:
        """Length at the newest update; a lower bound if that length is open."""
        return max(self.searched, self.pending_length)

    def resolve_open(self, known: int) -> None:
        """Set the length of an open update to ``known``."""
        if self.skipped == _OPEN:
            self.skipped = known
        if self.deferred and self.deferred[0][0] == _OPEN:
            self.deferred[0] = (known, self.deferred[0][1])

    def begin_anew(self) -> None:
        """Make the next update immediate, after a search from the start."""
        self.restart = True
        self.update_from = 0


class ThinkingBudget(FixedHolder, Feature):
    """Upstream's state holder, with the history of one live batch."""

    def __init__(
        self,
        batch: "InputBatch",
        history: "History",
        holder: "ThinkingBudgetStateHolder",
        on: frozenset[str],
    ) -> None:
        super().__init__(holder, on)
        self.batch = batch
        self.history = history
        #: Markers, by the key of their index in upstream's state.
        self._markers = {
            "start_thinking": self.think_start_token_ids,
            "end_thinking": self.think_end_token_ids,
        }
        #: Rows with a state, the state and its progress.
        self._tracked: list[tuple[int, dict[str, Any], _Progress]] = []
        self._any_deferred = False

    @classmethod
    def make(cls, live: "Live") -> "ThinkingBudget | None":
        """Replace a batch's state holder, if it has one."""
        holder = live.batch.thinking_budget_state_holder
        history = live.find(History)
        if holder is None or history is None:
            return None
        thinking = cls(live.batch, proxy(history), holder, live.serving)
        live.batch.thinking_budget_state_holder = thinking
        history.arrived = thinking.arrive
        return thinking

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, tuple[type], dict[str, Any]]:
        """Pickle and copy as upstream's holder, with the fixes that are on."""
        fixes = self.fixes_rows or self.fixes_sections or self.fixes_unlimited
        own, keys = (_OWN, {_PROGRESS}) if fixes else (_OWN | ATTRIBUTES, {_PROGRESS, *KEYS})
        attributes = {name: vars(self)[name] for name in vars(self).keys() - own}
        plain = {
            id(state): {key: value for key, value in state.items() if key not in keys}
            for state in self._state.values()
        }
        attributes["_state"] = {row: plain[id(state)] for row, state in self._state.items()}
        kind = FixedHolder if fixes else ThinkingBudgetStateHolder
        return object.__new__, (kind,), attributes

    def sync_batch(self, batch_update: "BatchUpdate | None") -> None:
        """Update for requests that join, leave or move. Their progress moves with them."""
        super().sync_batch(batch_update)
        if not batch_update:
            return
        rows = Counter(map(id, self._state.values()))
        self._tracked = [
            (row, state, state.setdefault(_PROGRESS, _Progress()))
            for row, state in self._state.items()
        ]
        for _, state, progress in self._tracked:
            shared = rows[id(state)] > 1
            if shared or progress.shared:
                progress.begin_anew()
            progress.shared = shared

    def cut(self, req_id: str, length: int) -> None:
        """Restart the search of an output if searched tokens may be truncated."""
        row = self.batch.req_id_to_index[req_id]
        state = self._state.get(row)
        if state is not None and length < self.history.known(row):
            state[_PROGRESS].begin_anew()

    def begin_anew(self) -> None:
        """Search each request's output from the start again, in the next step."""
        for _, _, progress in self._tracked:
            progress.begin_anew()

    def waiting(self) -> Iterator[int]:
        """Yield the rows whose update in this step depends on tokens that may not have arrived."""
        outputs = self.batch.req_output_token_ids
        drafts = self.batch.spec_token_ids
        for row, state, progress in self._tracked:
            if row >= len(outputs):
                continue
            output = outputs[row]
            reach = len(output) + len(drafts[row])
            if reach < progress.update_from and progress.output is output:
                continue
            if output and self._may_force(row, state, progress, reach):
                yield row

    def arrive(self, rows: list[int], tokens: list[int] | None) -> None:
        """Search the tokens of a settled step; ``tokens`` is None if a row may have several."""
        # Tokens without the last token of a marker complete no marker.
        if tokens is not None and not self._any_deferred and self.last_tokens.isdisjoint(tokens):
            return
        outputs = self.batch.req_output_token_ids
        for row in rows:
            state = self._state.get(row)
            if state is None:
                continue
            progress: _Progress = state[_PROGRESS]
            if progress.restart or progress.output is not outputs[row]:
                continue
            known = self.history.known(row)
            progress.resolve_open(known)
            # Tokens without a due update may still be truncated.
            self._search(state, progress, min(known, progress.pending_length))
            self._update_deferred(state, progress, known)
        self._any_deferred = any(progress.deferred for _, _, progress in self._tracked)

    def update_state(
        self,
        output_token_ids: Lists,
        spec_token_ids: Lists | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Make, skip or defer the step's updates; called once per step.

        Only ``spec_token_ids`` [rows], the step's drafts, is read: outputs are the live batch's,
        and 0.22.0's samplers do not pass ``repeat_indices``.
        """
        outputs = self.batch.req_output_token_ids
        drafts = spec_token_ids or []
        drafted = self.history.drafted
        for row, state, progress in self._tracked:
            if row >= len(outputs):
                continue
            output = outputs[row]
            specs = drafts[row] if row < len(drafts) else []
            length = len(output)
            reach = length + len(specs)
            unread = length > 0 and output[-1] == PLACEHOLDER
            if reach < progress.update_from and progress.output is output:
                if progress.searched < length and not unread and progress.update_from != _NEVER:
                    self._search(state, progress, length)
                progress.skipped = _OPEN if drafted and unread else length
            elif progress.force_from == _NEVER:
                continue
            elif unread and not self._may_force(row, state, progress, reach):
                progress.deferred.append((_OPEN if drafted else length, list(specs)))
                progress.update_from = 0
                self._any_deferred = True
            else:
                self._update_now(state, progress, output, specs)

    def apply_to_logits(
        self, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: Lists | None
    ) -> torch.Tensor:
        """Force end markers; a no-op unless an update forces one."""
        if any(state["in_end"] for state in self._state.values()):
            return super().apply_to_logits(logits, predict_bonus_token, spec_token_ids)
        return logits

    def _may_force(self, row: int, state: dict[str, Any], progress: _Progress, reach: int) -> bool:
        """Return whether an update at ``reach`` may force a token, if it is not skipped."""
        budget: int = state["thinking_token_budget"]
        if progress.force_from == _NEVER:
            return False
        if progress.restart or progress.output is not self.batch.req_output_token_ids[row]:
            return True
        if state["start_thinking"] != -1:
            return reach >= progress.force_from
        # If the start marker has not arrived, neither has any token after it.
        return reach - self.history.known(row) > budget

    def _search(self, state: dict[str, Any], progress: _Progress, length: int) -> None:
        """Search an output's unsearched tokens up to ``length`` for missing markers."""
        output = progress.output
        assert output is not None
        searched, progress.searched = progress.searched, max(length, progress.searched)
        if state["end_thinking"] != -1 and state["start_thinking"] != -1:
            return
        if self.last_tokens.isdisjoint(output[searched:length]):
            return
        if self.fixes_sections:
            if self.follow_sections(state, output, searched, length):
                self._skip_no_older(progress, length)
                self._set_thresholds(state, progress)
            return
        unstarted = state["start_thinking"] == -1
        for name, marker in self._markers.items():
            if state[name] == -1:
                first = max(0, searched - len(marker) + 1)
                state[name] = find_last(output, marker, first, length)
        if unstarted:
            self._skip_no_older(progress, length)
        self._set_thresholds(state, progress)

    @staticmethod
    def _skip_no_older(progress: _Progress, length: int) -> None:
        """Drop a skipped update of a shorter output: nothing was counted at that time."""
        if progress.skipped is not None and progress.skipped < length:
            progress.skipped = None

    def _update_now(
        self, state: dict[str, Any], progress: _Progress, output: list[int], drafts: list[int]
    ) -> None:
        """Make this step's update, after all skipped and deferred updates."""
        length = len(output)
        if progress.output is not None:
            known = len(progress.output)  # its request may have moved to another row
            self._search(state, progress, min(known, progress.pending_length))
            self._update_deferred(state, progress, known)
        if progress.restart or progress.output is not output:
            if self.fixes_sections and length < progress.updated:
                self.rewind(state)
                progress.skipped = None
                progress.deferred.clear()
            self._update_skipped(state, progress)
            progress.output = output
            progress.searched = 0
            progress.restart = progress.shared
        self._search(state, progress, length)
        self._update_at(state, progress, length, drafts)
        if progress.restart:
            progress.update_from = 0

    def _update_deferred(self, state: dict[str, Any], progress: _Progress, known: int) -> None:
        """Make the deferred updates whose tokens have arrived."""
        while progress.deferred and _OPEN < progress.deferred[0][0] <= known:
            length, drafts = progress.deferred.popleft()
            self._update_at(state, progress, length, drafts)
        if progress.deferred:
            progress.update_from = 0

    def _update_skipped(self, state: dict[str, Any], progress: _Progress) -> None:
        """Make one update, which has the effect of all skipped updates."""
        length, progress.skipped = progress.skipped, None
        if length is not None:
            self._call_upstream(state, progress, length, [])

    def _update_at(
        self, state: dict[str, Any], progress: _Progress, length: int, drafts: list[int]
    ) -> None:
        """Make an update at a length of the output, after all skipped updates."""
        self._update_skipped(state, progress)
        self._call_upstream(state, progress, length, drafts)
        self._set_thresholds(state, progress)

    def _call_upstream(
        self, state: dict[str, Any], progress: _Progress, length: int, drafts: list[int]
    ) -> None:
        """Run upstream's update on the first ``length`` tokens of the output."""
        assert progress.output is not None
        state["output_tok_ids"] = SearchedOutput(progress.output, length)
        state["spec_token_ids"] = list(drafts)
        state["in_spec_mode"] = self.in_spec_mode
        state["force_index"] = []
        self._update_think_state(state)

    def _set_thresholds(self, state: dict[str, Any], progress: _Progress) -> None:
        """Compute the reaches from which updates do more than count down, and may force tokens."""
        budget = state["thinking_token_budget"]
        start, end = state["start_thinking"], state["end_thinking"]
        prompt = len(state["prompt_tok_ids"] or ()) if state["continue_thinking"] else 0
        over = not state["in_end"] and start != -1 and end != -1 and start <= end + prompt
        if over or budget == UNLIMITED:
            # Upstream does not search for another start marker.
            progress.update_from = progress.force_from = _NEVER
        elif state["in_end"]:
            progress.update_from = progress.force_from = 0
        elif start == -1 and self.fixes_sections:
            # A start marker can only end in a token that has not been searched.
            progress.update_from = progress.force_from = progress.searched + 1 + budget
        else:
            counted = state["prev_output_length"]
            progress.update_from = state["check_count_down"] + counted
            if not counted and not state["continue_thinking"]:
                # Upstream begins to count after the marker's width, wherever the marker occurs.
                width = len(self.think_start_token_ids)
                progress.update_from = progress.update_from + width if start == -1 else 0
            progress.force_from = self.used_up(state)


def reads_lists(holder: "ThinkingBudgetStateHolder | None", otherwise: bool) -> bool:
    """Return ``otherwise``, upstream's answer; False if the holder does not read the lists."""
    return otherwise and not isinstance(holder, ThinkingBudget)
