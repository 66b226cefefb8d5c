"""Thinking budgets, ours beside upstream's state holder, decision by decision.

Upstream's holder is given every token at once. Ours is given lists that lag: a stand-in
for the history writes a step's tokens when the test says so, or when ours waits for them.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import draws
from support.lockstep import LockstepRun
from vllm.v1.readiness.engine import fences
from vllm.v1.readiness.outputs.history import PLACEHOLDER
from vllm.v1.readiness.registry import THINKING_ROWS, THINKING_SECTIONS, THINKING_UNLIMITED
from vllm.v1.readiness.sample.thinking_budget import _NEVER, _PROGRESS, ThinkingBudget
from vllm.v1.readiness.sample.thinking_fixes import FixedHolder
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

VOCABULARY = 5
FIXES = [
    frozenset(),
    frozenset({THINKING_ROWS}),
    frozenset({THINKING_ROWS, THINKING_SECTIONS, THINKING_UNLIMITED}),
]
MARKED = st.sampled_from([0, 0, 0, 1, 1, 2])
MARKER = st.lists(MARKED, min_size=1, max_size=3)
#: What upstream's state says of a request that may still be made to stop thinking.
FIELDS = (
    "in_think",
    "in_end",
    "check_count_down",
    "think_count",
    "end_count",
    "prev_output_length",
    "start_thinking",
    "end_thinking",
    "bonus_token_forced",
)


class Row:
    """A request in one row.

    Attributes:
        tokens: its output.
        listed: its output as ours is shown it, with placeholders at the end.
        drafted: how many drafts the last step had for it.
    """

    def __init__(self, prompt: list[int], tokens: list[int], budget: int | None) -> None:
        self.prompt = prompt
        self.tokens = tokens
        self.listed = list(tokens)
        self.budget = budget
        self.drafted = 0


class Model:
    """Both holders, and a history that lags.

    Args:
        markers: the start and the end marker.
        drafts: draft tokens a step at most.
        asynchronous: whether a step is scheduled before the one before it is read.
        fixes: those of thinking budgets that are on.
    """

    def __init__(
        self,
        markers: tuple[list[int], list[int]],
        drafts: int,
        asynchronous: bool,
        fixes: frozenset[str] = frozenset(),
    ) -> None:
        self.drafts = drafts
        self.asynchronous = asynchronous
        self.rows: list[Row] = []
        self.in_flight: deque[list[tuple[Row, list[int]]]] = deque()
        self.waits = 0
        config = SimpleNamespace(
            reasoning_start_token_ids=markers[0], reasoning_end_token_ids=markers[1]
        )
        holders = [
            ThinkingBudgetStateHolder(config, 16, drafts, torch.device("cpu"), False)
            for _ in range(2)
        ]
        #: Upstream's holder; with the fixes, the one that has them and sees every token.
        self.stock = FixedHolder(holders[0], fixes) if fixes else holders[0]
        self.batch: Any = SimpleNamespace(req_output_token_ids=[], spec_token_ids=[])
        history: Any = SimpleNamespace(
            drafted=False, known=self.known, settle_older=lambda _: self.arrive(keep=1)
        )
        self.history = history
        self.ours = ThinkingBudget(self.batch, history, holders[1], fixes)

    def known(self, row: int) -> int:
        """How much of a row's output is known."""
        return sum(token != PLACEHOLDER for token in self.rows[row].listed)

    def join(self, row: Row) -> BatchUpdate:
        """A request takes the next row."""
        self.rows.append(row)
        params = SimpleNamespace(thinking_token_budget=row.budget)
        return self.update(added=[(len(self.rows) - 1, params, row.prompt, row.tokens)])

    def leave(self, at: int) -> None:
        """A request leaves, and the last one takes its row."""
        last = len(self.rows) - 1
        # A row that is filled again is not said to be removed: upstream's state of it
        # passes to who comes there, unless that one has a state of its own.
        moved = [(last, at, MoveDirectionality.UNIDIRECTIONAL)] if at != last else []
        self.rows[at] = self.rows[last]
        self.rows.pop()
        self.update(removed=[] if moved else [at], moved=moved)
        kept = set(map(id, self.rows))
        for step in self.in_flight:
            step[:] = [(row, tokens) for row, tokens in step if id(row) in kept]

    def swap(self, one: int, other: int) -> None:
        """Two rows change places, as attention backends ask for."""
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]
        self.update(moved=[(one, other, MoveDirectionality.SWAP)])

    def cut(self, at: int, length: int) -> None:
        """An output is cut back; what is in flight for it is lost."""
        row = self.rows[at]
        self.show()
        self.batch.req_id_to_index = {"this": at}
        self.ours.cut("this", length)
        del row.tokens[length:]
        del row.listed[length:]
        for step in self.in_flight:
            step[:] = [(other, tokens) for other, tokens in step if other is not row]

    def update(self, removed: Any = (), added: Any = (), moved: Any = ()) -> BatchUpdate:
        """Tell both of a change to the batch."""
        changes = BatchUpdate(
            batch_size=len(self.rows), removed=list(removed), added=list(added), moved=list(moved)
        )
        self.stock.sync_batch(changes)
        self.ours.sync_batch(changes)
        return changes

    def guess(self, *rows: Row) -> None:
        """Take it that all drafts were accepted, as the runner does when a step begins."""
        for row in rows:
            row.listed.extend([PLACEHOLDER] * row.drafted)
            row.drafted = 0

    def show(self) -> None:
        """Let ours see the rows as they are."""
        self.batch.req_output_token_ids = [row.listed for row in self.rows]

    def arrive(self, keep: int = 0) -> None:
        """Steps arrive, oldest first."""
        while len(self.in_flight) > keep:
            step = self.in_flight.popleft()
            self.show()
            at = {id(row): number for number, row in enumerate(self.rows)}
            written = [(at[id(row)], tokens) for row, tokens in step]
            for row, tokens in step:
                known = sum(token != PLACEHOLDER for token in row.listed)
                newer = sum(row is other for later in self.in_flight for other, _ in later)
                row.listed[known : len(row.listed) - newer] = tokens
            ids = None if self.history.drafted else [tokens[0] for _, tokens in written]
            if self.asynchronous:
                self.ours.arrive([number for number, _ in written], ids)

    def sample(self, specs: list[list[int]]) -> list[torch.Tensor]:
        """Decide, and compare; the logits that both made."""
        self.batch.spec_token_ids = [list(spec) for spec in specs]
        self.show()
        if any(self.rows[row].listed[-1] == PLACEHOLDER for row in self.ours.waiting()):
            self.waits += 1
            self.arrive()
        self.show()
        masked = []
        outputs = [list(row.tokens) for row in self.rows]
        ends = (
            [[*output, *spec] for output, spec in zip(outputs, specs, strict=True)],
            self.batch.req_output_token_ids,
        )
        for holder, lists in zip((self.stock, self.ours), ends, strict=True):
            logits = []
            if holder.has_tracked_requests():
                holder.update_state(lists, specs, None)
            modes = [True, False] if self.drafts else [False]
            for bonus in modes:
                count = len(specs) if bonus or not self.drafts else sum(map(len, specs))
                plain = torch.zeros(count, VOCABULARY)
                logits.append(holder.apply_to_logits(plain, bonus, specs))
            masked.append(logits)
        for theirs, ours in zip(*masked, strict=True):
            assert torch.equal(theirs, ours)
        assert all(len(state[_PROGRESS].deferred) < 2 for state in self.ours._state.values())
        return masked[1]

    def compare(self) -> None:
        """What the states hold, once everything was shown and made up for."""
        for number in self.stock._state:
            theirs, ours = self.stock._state[number], self.ours._state[number]
            progress = ours[_PROGRESS]
            assert theirs["in_end"] == ours["in_end"]
            if progress.force_from == _NEVER or number >= len(self.rows):
                continue
            assert not progress.deferred
            self.ours._update_skipped(ours, progress)
            assert {name: theirs[name] for name in FIELDS} == {name: ours[name] for name in FIELDS}


@given(data=st.data())
@draws(30)
@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fixes", FIXES)
def test_every_decision_is_upstreams(
    fixes: frozenset[str], drafts: int, asynchronous: bool, data: st.DataObject
) -> None:
    """Random tokens, drafts, rejections, cuts, moves and delays, also where a fix is on."""
    draw = data.draw
    model = Model(draw(st.tuples(MARKER, MARKER)), drafts, asynchronous, fixes)
    for _ in range(draw(st.integers(3, 24))):
        # A step in flight with drafts is not written until the rows have their guesses.
        if not model.history.drafted and draw(st.booleans()):
            model.arrive(keep=draw(st.integers(0, 1)))
        model.show()
        model.history.settle_older("history")
        for number, row in enumerate(model.rows):
            if draw(st.integers(0, 15)) == 0 and row.tokens:
                model.guess(row)
                model.cut(number, draw(st.integers(0, model.known(number))))
        model.guess(*model.rows)
        if (len(model.rows) < 3 and draw(st.integers(0, 3)) == 0) or not model.rows:
            prompt = draw(st.lists(MARKED, min_size=1, max_size=5))
            output = draw(st.sampled_from([[], [], [], draw(st.lists(MARKED, max_size=5))]))
            budget = draw(st.sampled_from([None, -1, 0, 1, 2, 3, 4, 6, 9, 30]))
            model.join(Row(prompt, output, budget))
        if len(model.rows) > 1:
            event = draw(st.sampled_from(["leave", "swap", *["nothing"] * 8]))
            if event == "leave":
                model.leave(draw(st.integers(0, len(model.rows) - 1)))
            if event == "swap":
                model.swap(0, len(model.rows) - 1)
        specs = [draw(st.lists(MARKED, max_size=drafts)) for _ in model.rows]
        model.sample(specs)
        step = []
        for row, spec in zip(model.rows, specs, strict=True):
            if draw(st.integers(0, 9)) == 0:
                continue  # sampled for nothing: a part of a prompt
            accepted = draw(st.integers(0, len(spec)))
            tokens = [*spec[:accepted], draw(MARKED)]
            row.tokens.extend(tokens)
            row.listed.append(PLACEHOLDER)
            row.drafted = len(spec)
            step.append((row, tokens))
        model.in_flight.append(step)
        model.history.drafted = drafts > 0 and asynchronous
        if not asynchronous:
            model.guess(*model.rows)
            model.arrive()
    model.guess(*model.rows)
    model.arrive()
    model.sample([[] for _ in model.rows])
    if THINKING_SECTIONS not in fixes:  # with it, fewer updates that change nothing are made
        model.compare()


class Counting(list[int]):
    """An output that counts the tokens that are read of it in slices."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        tokens = super().__getitem__(index)
        if isinstance(index, slice):
            self.read += len(tokens)
        return tokens


@pytest.mark.parametrize("prompt", [[2], [0]])
@pytest.mark.parametrize("budget", [3, 10_000])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fixes", FIXES)
def test_a_step_reads_only_new_tokens(
    fixes: frozenset[str], asynchronous: bool, budget: int, prompt: list[int]
) -> None:
    """The cost depends neither on the output's length nor on whether a marker is found."""
    model = Model(([0, 1], [1, 1, 0]), drafts=0, asynchronous=asynchronous, fixes=fixes)
    row = Row(prompt, [2] * 500, budget)
    row.listed = Counting(row.tokens)
    model.join(row)
    model.sample([[]])
    row.listed.read = 0
    for _ in range(200):
        row.tokens.append(3)
        row.listed.append(PLACEHOLDER)
        model.in_flight.append([(row, [3])])
        model.arrive(keep=int(asynchronous))
        model.sample([[]])
    assert row.listed.read <= 3 * 200


def waits_of(lockstep: LockstepRun) -> dict[str, int]:
    """How often the host waits from here to the end of a lockstep run, by owner."""
    before = dict(fences.counts())
    lockstep.finish()
    return {
        name: count - before.get(name, 0)
        for name, count in fences.counts().items()
        if count > before.get(name, 0)
    }


@pytest.mark.parametrize(("end", "budget"), [([35], 20), ([35, 36, 34], 12)])
def test_only_a_step_that_may_force_waits(end: list[int], budget: int) -> None:
    """One wait for the first token of the end marker, and one after each of its tokens."""
    lockstep = LockstepRun(markers=([36], end))
    lockstep.add([36], thinking_token_budget=budget, max_tokens=40, ignore_eos=True)
    assert waits_of(lockstep) == {"thinking-budget": 1 + len(end)}
    assert lockstep.stock.waits > 30


@pytest.mark.parametrize(
    ("markers", "prompt"),
    [
        (([36], [35]), [36, 35]),  # thinking is over
        (([36, 35, 36], [34]), [1]),  # it has not begun, and the budget outlasts tokens in flight
    ],
)
def test_without_thinking_nothing_waits(
    markers: tuple[list[int], list[int]], prompt: list[int]
) -> None:
    lockstep = LockstepRun(markers=markers)
    lockstep.add(prompt, thinking_token_budget=3, max_tokens=40)
    assert waits_of(lockstep) == {}


def test_switched_off_upstream_waits_for_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_READINESS", "-thinking-budget")
    lockstep = LockstepRun(markers=([36], [35]))
    lockstep.add([36], thinking_token_budget=9, max_tokens=20)
    assert not isinstance(lockstep.ours.batch.thinking_budget_state_holder, ThinkingBudget)
    waits = waits_of(lockstep)
    assert waits["logits-processors"] + waits.get("thinking-budget", 0) > 15
