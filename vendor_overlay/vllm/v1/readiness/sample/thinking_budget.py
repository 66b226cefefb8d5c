"""Feature ``thinking-budget``: thinking budgets that search only new tokens, and rarely wait.

On every step until it has found both markers, upstream searches a request's whole output for the
start and the end marker, for which it needs the newest token on the host. Here upstream's
``_update_think_state`` still makes every decision, but

- only tokens that have arrived since the last search are searched, and as many tokens before them
  as a marker may extend over;
- while the remaining budget exceeds the number of tokens that a step may add, an update would only
  count down. It is skipped, and one call later replaces all skipped updates;
- an update that cannot force a token yet is deferred until its tokens have arrived;
- the host waits only in a step that may begin or continue to force the end marker.

With ``thinking-rows`` off, swapping a request that has a budget with one that has none leaves two
rows with one shared state, as in upstream. Both outputs are then searched from the start in every
step, and the host waits for them. With ``thinking-sections`` (:mod:`.thinking_fixes`) the search
continues after a section, and nothing waits until another section may exceed the budget.

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
from vllm.v1.readiness.feature import Feature
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

#: Reach that no request attains.
_NEVER = maxsize
#: Length that depends on how many drafts are accepted.
_OPEN = -1
#: Key of a request's :class:`_Progress` in upstream's state of the request.
_PROGRESS = "readiness"
#: Attributes of :class:`ThinkingBudget` that upstream's holder lacks.
_OWN = {"batch", "history", "_markers", "_tracked", "_any_deferred"}


@dataclass(slots=True, eq=False)
class _Progress:
    """Progress of one request's search and updates."""

    output: list[int] | None = None  # the output list that is searched
    searched: int = 0  # number of searched tokens of ``output``
    #: Reach from which an update does more than count down; 0 to make the next update.
    update_from: int = 0
    #: Reach from which an update may force the end marker, once the start marker is known.
    force_from: int = 0
    #: Output length at the last skipped update; _OPEN if it is not known yet.
    skipped: int | None = None
    #: Deferred updates: the output length, or _OPEN, and the drafts of the step.
    deferred: deque[tuple[int, list[int]]] = field(default_factory=deque)
    restart: bool = True  # search from the start again, and do not defer the next update
    shared: bool = False  # the state is that of two rows

    @property
    def pending_length(self) -> int:
        """Output length at the newest skipped or deferred update; 0 if unknown or none."""
        return max(0, self.deferred[-1][0] if self.deferred else self.skipped or 0)

    @property
    def updated(self) -> int:
        """Output length at the newest update; a lower bound if that length is _OPEN."""
        return max(self.searched, self.pending_length)

    def resolve_open(self, known: int) -> None:
        """Replace the length _OPEN of the oldest pending update by ``known``."""
        if self.skipped == _OPEN:
            self.skipped = known
        if self.deferred and self.deferred[0][0] == _OPEN:
            self.deferred[0] = (known, self.deferred[0][1])

    def begin_anew(self) -> None:
        """Restart the search, and do not skip or defer the next update."""
        self.restart = True
        self.update_from = 0


class ThinkingBudget(FixedHolder, Feature):
    """Upstream's state holder, based on the history of one live batch."""

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
        #: Key of a marker's index in upstream's state, to the marker.
        self._markers = {
            "start_thinking": self.think_start_token_ids,
            "end_thinking": self.think_end_token_ids,
        }
        #: Row, state and progress of each request that has a state.
        self._tracked: list[tuple[int, dict[str, Any], _Progress]] = []
        self._any_deferred = False

    @classmethod
    def make(
        cls, batch: "InputBatch", history: "History", on: frozenset[str]
    ) -> "ThinkingBudget | None":
        """Replace the batch's state holder; None if there is none."""
        holder = batch.thinking_budget_state_holder
        if holder is None:
            return None
        thinking = cls(batch, proxy(history), holder, on)
        batch.thinking_budget_state_holder = thinking
        history.arrived = thinking.arrive
        return thinking

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, tuple[type], dict[str, Any]]:
        """Pickle and copy as upstream's holder, or as a FixedHolder if any fix is on."""
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
        """Update the states for requests that join, leave or move to another row."""
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
        """Restart the search if the truncation may remove searched tokens."""
        row = self.batch.req_id_to_index[req_id]
        state = self._state.get(row)
        if state is not None and length < self.history.known(row):
            state[_PROGRESS].begin_anew()

    def begin_anew(self) -> None:
        """Restart the search of each output in the next step."""
        for _, _, progress in self._tracked:
            progress.begin_anew()

    def waiting(self) -> Iterator[int]:
        """Yield the rows whose update in this step needs tokens that may be in flight."""
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
        """Search a settled step's tokens, one per row; None if a row may have several."""
        # No marker is complete without its last token.
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
            # Tokens beyond the newest update may still be truncated.
            self._search(state, progress, min(known, progress.pending_length))
            self._update_deferred(state, progress, known)
        self._any_deferred = any(progress.deferred for _, _, progress in self._tracked)

    def update_state(
        self,
        output_token_ids: Lists,
        spec_token_ids: Lists | None,
        repeat_indices: torch.Tensor | None = None,
    ) -> None:
        """Make, skip or defer the updates of a step with the drafts ``spec_token_ids``.

        The other arguments are ignored: the live batch has the outputs, and 0.22.0's samplers do
        not pass ``repeat_indices``.
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
        """Force the tokens of end markers; a no-op unless an update has begun to force one."""
        if any(state["in_end"] for state in self._state.values()):
            return super().apply_to_logits(logits, predict_bonus_token, spec_token_ids)
        return logits

    def _may_force(self, row: int, state: dict[str, Any], progress: _Progress, reach: int) -> bool:
        """Return whether an update at ``reach`` may force a token."""
        budget: int = state["thinking_token_budget"]
        if progress.force_from == _NEVER:
            return False
        if progress.restart or progress.output is not self.batch.req_output_token_ids[row]:
            return True
        if state["start_thinking"] != -1:
            return reach >= progress.force_from
        # If the start marker has not arrived, no token of the section has.
        return reach - self.history.known(row) > budget

    def _search(self, state: dict[str, Any], progress: _Progress, length: int) -> None:
        """Search the unsearched part of the first ``length`` tokens for missing markers."""
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
        """Drop a skipped update of an output shorter than ``length``: it counted nothing."""
        if progress.skipped is not None and progress.skipped < length:
            progress.skipped = None

    def _update_now(
        self, state: dict[str, Any], progress: _Progress, output: list[int], drafts: list[int]
    ) -> None:
        """Make this step's update, after all skipped and deferred updates."""
        length = len(output)
        if progress.output is not None:
            known = len(progress.output)  # the request may have moved to another row
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
        """Make one update that has the effect of all skipped updates."""
        length, progress.skipped = progress.skipped, None
        if length is not None:
            self._call_upstream(state, progress, length, [])

    def _update_at(
        self, state: dict[str, Any], progress: _Progress, length: int, drafts: list[int]
    ) -> None:
        """Make an update at an output length, after all skipped updates."""
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
        """Compute ``update_from`` and ``force_from`` from upstream's state."""
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
            # The last token of a start marker has not been searched.
            progress.update_from = progress.force_from = progress.searched + 1 + budget
        else:
            counted = state["prev_output_length"]
            progress.update_from = state["check_count_down"] + counted
            if not counted and not state["continue_thinking"]:
                # Upstream counts from the length of the marker, wherever the marker occurs.
                width = len(self.think_start_token_ids)
                progress.update_from = progress.update_from + width if start == -1 else 0
            progress.force_from = self.used_up(state)


def reads_lists(holder: "ThinkingBudgetStateHolder | None", otherwise: bool) -> bool:
    """Return ``otherwise``, upstream's answer; False if ``holder`` ignores the lists."""
    return otherwise and not isinstance(holder, ThinkingBudget)
