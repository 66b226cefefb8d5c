"""Fixes ``thinking-rows``, ``-sections`` and ``-unlimited`` of upstream's thinking budgets.

In 0.22.0's ThinkingBudgetStateHolder

- ``thinking-rows``: two rows share a state after a swap of a request that has a budget with one
  that has none. If a request without a budget moves to a row, the row keeps the state of its last
  request. With a drafter, a step without drafts forces tokens in the batch's first rows. An end
  marker is then forced into a request without a budget, or another request's tokens are counted;
- ``thinking-sections``: the first end marker of an output, even outside a section, disables the
  budget, so later sections are unlimited. With drafts, a forced end marker of several tokens has
  the same effect if some of them are rejected. If a request leaves the batch while such a marker is
  forced, forcing starts again when the request returns
  (https://github.com/vllm-project/vllm/issues/43757)
  (https://github.com/vllm-project/vllm/issues/45984);
- ``thinking-unlimited``: a budget of -1 (unlimited) forces the end marker once if the prompt ends
  in a section and the engine has a drafter.

A *section* begins after a start marker, in the output or at the end of the prompt, and ends with
the next end marker. Other markers are ordinary tokens. With ``thinking-sections`` each section has
the whole budget. Upstream's code still makes each decision, but sees only the current section.
"""

# mirrors: vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.readiness import registry
from vllm.v1.sample.logits_processor.interface import MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu_input_batch import InputBatch

_FIXES = frozenset(
    {registry.THINKING_ROWS, registry.THINKING_SECTIONS, registry.THINKING_UNLIMITED}
)
#: Token ids per row.
Lists = list[list[int]]
#: Upstream's value for a request without a budget.
UNLIMITED = -1
#: Attributes of :class:`FixedHolder` and keys of a request's state that upstream lacks.
ATTRIBUTES = {"fixes_rows", "fixes_sections", "fixes_unlimited", "last_tokens"}
KEYS = {"searched", "resumed"}
#: Keys of a request's state that stay valid when a section ends.
_KEPT = ("prompt_tok_ids", "output_tok_ids", "spec_token_ids", "in_spec_mode")


class SearchedOutput:
    """Searched prefix of an output. Upstream's update gets it as its list, and finds no marker."""

    def __init__(self, output: list[int], length: int) -> None:
        self.output = output
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice) -> list[int]:
        start, stop, step = index.indices(self.length)
        return self.output[start:stop:step]


class FixedHolder(ThinkingBudgetStateHolder):  # type: ignore[misc]
    """Upstream's state holder with the fixes that are on.

    In each request's state, ``searched`` is the number of searched output tokens (0 if a derived
    class searches them), and ``resumed`` the end of the last marker that began or ended a section.
    """

    in_spec_mode: bool

    def __init__(self, holder: ThinkingBudgetStateHolder, on: frozenset[str]) -> None:
        self.__dict__.update(holder.__dict__)
        self.fixes_rows = registry.THINKING_ROWS in on
        self.fixes_sections = registry.THINKING_SECTIONS in on
        self.fixes_unlimited = registry.THINKING_UNLIMITED in on
        markers = (self.think_start_token_ids, self.think_end_token_ids)
        #: Last token of each marker.
        self.last_tokens = {marker[-1] for marker in markers if marker}

    def sync_batch(self, batch_update: "BatchUpdate | None") -> None:
        """Update the states for requests that join, leave or move to another row."""
        if not (self.fixes_rows and batch_update and batch_update.moved):
            super().sync_batch(batch_update)
            return
        super().sync_batch(replace(batch_update, moved=()))
        for source, target, direction in batch_update.moved:
            state, displaced = self._state.pop(source, None), self._state.pop(target, None)
            if state is not None:
                self._state[target] = state
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self._state[source] = displaced

    def apply_to_logits(
        self, logits: torch.Tensor, predict_bonus_token: bool, spec_token_ids: Lists | None
    ) -> torch.Tensor:
        """Force end markers in place in float32 logits [positions, vocab], and return the logits.

        ``predict_bonus_token`` says whether these are the logits of bonus tokens, which come after
        the drafts ``spec_token_ids`` [rows].
        """
        drafts = self.in_spec_mode
        if self.fixes_rows and not predict_bonus_token and not any(spec_token_ids or ()):
            self.in_spec_mode = False  # one position per row
        try:
            return super().apply_to_logits(logits, predict_bonus_token, spec_token_ids)
        finally:
            self.in_spec_mode = drafts

    def follow_sections(
        self, state: dict[str, Any], output: list[int], searched: int, length: int
    ) -> bool:
        """Search ``output[searched:length]``; return whether any section begins or ends there."""
        changed = False
        while state["thinking_token_budget"] != UNLIMITED:
            begins = state["start_thinking"] == -1
            marker = self.think_start_token_ids if begins else self.think_end_token_ids
            first = max(state["resumed"], searched - len(marker) + 1)
            index = next(occurrences(output, marker, first, length), -1)
            if index == -1:
                break
            if begins:
                state["start_thinking"] = index
            else:
                entry = self._init_state_entry(None, state["thinking_token_budget"])
                kept = {name: state[name] for name in (*_KEPT, "searched")}
                state.update(entry | kept)
            searched = state["resumed"] = index + len(marker)
            changed = True
        return changed

    def used_up(self, state: dict[str, Any]) -> int:
        """Return the output length at which upstream begins to force the end marker."""
        begin = state["start_thinking"]
        if state["continue_thinking"]:  # upstream's index includes the prompt
            begin -= len(state["prompt_tok_ids"] or ())
        length: int = begin + len(self.think_start_token_ids) + state["thinking_token_budget"]
        return length

    def _resume_end(self, state: dict[str, Any], output: SearchedOutput) -> None:
        """Resume forcing an end marker, if the request left the batch within the marker."""
        if state["start_thinking"] == -1 or state["thinking_token_budget"] == UNLIMITED:
            return
        used_up = 0 if state["in_end"] else self.used_up(state)  # 0: used up in the prompt
        forced = len(output) - used_up
        end = self.think_end_token_ids
        if 0 < forced < len(end) and output[used_up:] == end[:forced]:
            state["in_think"], state["in_end"] = False, True
            state["end_count"] = forced - 1
            state["prev_output_length"] = len(output) - 1

    def rewind(self, state: dict[str, Any]) -> None:
        """Reset the state to the end of the prompt, after a truncation of searched tokens."""
        budget = state["thinking_token_budget"]
        if budget == UNLIMITED:
            return
        entry = self._init_state_entry(state["prompt_tok_ids"], budget)
        state.update(entry | {name: state[name] for name in _KEPT})

    def _init_state_entry(self, prompt: list[int] | None, budget: int) -> dict[str, Any]:
        entry: dict[str, Any] = super()._init_state_entry(prompt, budget)
        if self.fixes_unlimited and budget == UNLIMITED:
            entry["in_end"] = False
        return entry | {"searched": 0, "resumed": 0}

    def _update_think_state(self, state: dict[str, Any]) -> None:
        """Run upstream's update on the current section."""
        if not self.fixes_sections:
            super()._update_think_state(state)
            return
        output = state["output_tok_ids"]
        if not isinstance(output, SearchedOutput):
            length = len(output)
            if length < state["searched"]:
                self.rewind(state)
            searched, state["searched"] = state["searched"], length
            if not self.last_tokens.isdisjoint(output[searched:]):
                self.follow_sections(state, output, searched, length)
            output = state["output_tok_ids"] = SearchedOutput(output, length)
        if not state["prev_output_length"]:
            self._resume_end(state, output)
        ending = state["in_end"]
        super()._update_think_state(state)
        if ending and not state["in_end"] and not state["in_think"]:
            # Upstream assumes that the drafts complete the marker. If they are rejected, the next
            # update forces it again.
            state["in_think"] = True
            state["check_count_down"] = 0

    @staticmethod
    def _find_last_sequence_index(
        target_list: list[int] | SearchedOutput, token_ids: list[int]
    ) -> int:
        """Search like upstream; find nothing in a :class:`SearchedOutput`."""
        if isinstance(target_list, SearchedOutput):
            return -1
        return find_last(target_list, token_ids, 0, len(target_list))


def mend(batch: "InputBatch", on: frozenset[str]) -> None:
    """Replace the batch's state holder by a :class:`FixedHolder`, if any of the fixes is on."""
    if on.isdisjoint(_FIXES):
        return
    holder = batch.thinking_budget_state_holder
    if type(holder) is ThinkingBudgetStateHolder:
        batch.thinking_budget_state_holder = FixedHolder(holder, on)


def occurrences(tokens: list[int], marker: list[int], first: int, end: int) -> Iterator[int]:
    """Yield the indices at which a marker occurs in ``tokens[first:end]``."""
    index = first + len(marker) - 1
    while marker:
        try:
            index = tokens.index(marker[-1], index, end)
        except ValueError:
            return
        begin = index + 1 - len(marker)
        if tokens[begin : index + 1] == marker:
            yield begin
        index += 1


def find_last(tokens: list[int], marker: list[int], first: int, end: int) -> int:
    """Return the last index at which a marker occurs in ``tokens[first:end]``, or -1."""
    return max(occurrences(tokens, marker, first, end), default=-1)
