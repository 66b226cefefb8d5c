"""The fix sessions: the turns of a streaming session have the history that they should have.

The scheduler is a real one, over a worker whose every token is computed from the tokens that
its KV cache holds. The pinned scheduler has the faults, which are asserted as well: with the fix
off ours has them.
"""

import random
from collections import deque
from typing import Any, NamedTuple

import pytest
from support.scheduling import BLOCK, Setup, make, of_side
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

STOP = 9
FIX = "sessions"


class Turn(NamedTuple):
    """What a client says, and the most tokens of its answer."""

    says: list[int]
    most: int
    at_once: bool


def talk(turns: list[Turn]) -> list[list[int]]:
    """The right answers: each turn drops the last token of the answer before."""
    history: list[int] = []
    answers = []
    for turn in turns:
        history += turn.says
        answer: list[int] = []
        while len(answer) < turn.most and (not answer or answer[-1] != STOP):
            answer.append(model(history + answer))
        history += answer[:-1]
        answers.append(answer)
    return answers


def model(history: list[int]) -> int:
    """The token that follows a history."""
    return random.Random(str(history)).randrange(5, 13)


class Worker:
    """Runs steps as a model runner does, each request with a KV cache of tokens."""

    def __init__(self, drafts: float) -> None:
        self.accepting = drafts
        self.chance = random.Random(2)
        self.tokens: dict[str, list[int]] = {}
        self.at: dict[str, int] = {}
        self.cache: dict[str, dict[int, int]] = {}

    def run(self, scheduled: Any) -> ModelRunnerOutput:
        """Run a step."""
        for new in scheduled.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.at[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for row, name in enumerate(cached.req_ids):
            if name in cached.resumed_req_ids:
                self.tokens[name] = list(cached.all_token_ids[name])
                self.at[name] = cached.num_computed_tokens[row]
        counts = scheduled.num_scheduled_tokens
        sampled = [self._compute(name, count, scheduled) for name, count in counts.items()]
        return ModelRunnerOutput([*counts], {name: n for n, name in enumerate(counts)}, sampled)

    def _compute(self, name: str, count: int, scheduled: Any) -> list[int]:
        drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
        tokens, cache = self.tokens[name], self.cache.setdefault(name, {})
        end = self.at[name] + count - drafts
        for place in range(self.at[name], end):
            cache[place] = tokens[place]
        self.at[name] = end
        if end < len(tokens):
            return []
        accepted = sum(self.chance.random() < self.accepting for _ in range(drafts))
        sampled = []
        for number in range(1 + accepted):
            sampled.append(model([cache[place] for place in range(end + number)]))
            if number < accepted:
                cache[end + number] = sampled[-1]
        tokens += sampled
        self.at[name] += accepted
        return sampled


class Sessions:
    """An engine's loop, with clients that talk in turns.

    Attributes:
        answers: of each session, the tokens of each turn.
    """

    def __init__(
        self, scheduler: Any, sessions: list[list[Turn]], drafts: float, preempting: float = 0.0
    ) -> None:
        self.scheduler, self.preempting = scheduler, preempting
        self.chance = random.Random(3)
        self.sessions = {f"s{number}": turns for number, turns in enumerate(sessions)}
        self.answers: dict[str, list[list[int]]] = {name: [[]] for name in self.sessions}
        self.worker = Worker(drafts)
        self.in_flight = 2 if hasattr(scheduler, "_spec_token_placeholders") else 1
        self.queue: deque[Any] = deque()

    def run(self, steps: int = 300) -> Any:
        """Run the sessions; their answers, or the error that ended the engine."""
        for name in self.sessions:
            self.say(name, 0)
        try:
            for _ in range(steps):
                self.step()
        except (RuntimeError, AssertionError, ValueError, KeyError, IndexError) as error:
            return type(error)
        return list(self.answers.values())

    def say(self, name: str, number: int) -> None:
        """Say a turn, and those that follow it at once."""
        turns = self.sessions[name]
        while number < len(turns):
            params = SamplingParams(max_tokens=turns[number].most, stop_token_ids=[STOP])
            request = Request(name, list(turns[number].says), params, None, resumable=True)
            self.scheduler.add_request(request)
            number += 1
            if number < len(turns) and not turns[number].at_once:
                return
        params = SamplingParams(max_tokens=1)
        self.scheduler.add_request(Request(name, [1], params, None))  # it is over

    def step(self) -> None:
        """Schedule a step, and read the output of the one before."""
        scheduled = self.schedule()
        self.queue.append((scheduled, self.worker.run(scheduled)))
        if len(self.queue) < self.in_flight and scheduled.total_num_scheduled_tokens:
            return
        outputs = self.scheduler.update_from_output(*self.queue.popleft())
        for output in outputs[0].outputs if 0 in outputs else ():
            name = output.request_id
            self.answers[name][-1] += output.new_token_ids
            if output.finish_reason is not None:
                number = len(self.answers[name])
                self.answers[name].append([])
                if number < len(self.sessions[name]) and not self.sessions[name][number].at_once:
                    self.say(name, number)
        if self.in_flight == 1 and self.scheduler.num_spec_tokens:
            names = [request.request_id for request in self.scheduler.running]
            drafts = [[0] * self.scheduler.num_spec_tokens for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def schedule(self) -> Any:
        """Schedule a step, perhaps without the request that ran last: its blocks are taken."""
        running = self.scheduler.running
        if not running or self.chance.random() >= self.preempting:
            return self.scheduler.schedule()
        self.scheduler._preempt_request(running.pop(), 0.0)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)  # none joins such a step
        try:
            return self.scheduler.schedule()
        finally:
            self.scheduler.set_pause_state(PauseState.UNPAUSED)


def drawn(seed: int, at_once: float) -> list[list[Turn]]:
    """Sessions of several turns, so many of which are said before the one before is answered."""
    chance = random.Random(seed)
    sessions = []
    for _ in range(4):
        most = chance.randint(2, 6)
        says = [chance.choices(range(14, 30), k=chance.randint(1, 7)) for _ in range(4)]
        sessions.append([Turn(words, most, chance.random() < at_once) for words in says])
    return sessions


def setup_of(asynchronous: bool, drafts: int = 0) -> Setup:
    """The options of a scheduler."""
    return Setup(
        asynchronous=asynchronous,
        caching=False,
        blocks=96,
        seqs=4,
        budget=16,
        length=128,
        drafts=drafts,
    )


KINDS: dict[str, tuple[bool, int, float]] = {
    "asynchronous": (True, 0, 0.0),
    "asynchronous, with drafts": (True, 3, 0.0),
    "asynchronous, with preemptions": (True, 0, 0.3),
    "synchronous, with drafts": (False, 3, 0.0),
}


@pytest.mark.parametrize(("asynchronous", "drafts", "preempting"), KINDS.values(), ids=KINDS)
def test_each_turn_is_answered_from_its_history(
    side: str,
    asynchronous: bool,
    drafts: int,
    preempting: float,
) -> None:
    wrong = 0
    for seed in range(6):
        sessions = drawn(seed, at_once=0.5)
        scheduler = of_side(side, setup_of(asynchronous, drafts))
        answers = Sessions(scheduler, sessions, 0.7, preempting).run()
        right = [[*talk(turns), []] for turns in sessions]
        wrong += answers != right or bool(scheduler.requests)
    assert (wrong > 0) == (side != "ours")


def test_a_block_keeps_no_hash_of_a_dropped_token(side: str) -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    scheduler = of_side(side, setup_of(asynchronous=False))
    worker = Worker(0)
    says = [14] * (BLOCK - 1)
    for _ in range(2):
        params = SamplingParams(max_tokens=1)
        session = Request("s", says, params, None, resumable=True, block_hasher=hasher)
        scheduler.add_request(session)
    session = scheduler.requests["s"]
    scheduled = scheduler.schedule()
    scheduler.update_from_output(scheduled, worker.run(scheduled))
    tokens = list(session.all_token_ids)
    assert tokens == [14] * (2 * BLOCK - 2)  # the answer is dropped
    alike = Request("t", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    assert (session.block_hashes == alike.block_hashes) == (side == "ours")


def test_a_scheduler_that_takes_steps_in_by_itself_is_left_to_upstream() -> None:
    sessions = drawn(1, at_once=0.5)
    stock = Sessions(of_side("pinned", setup_of(asynchronous=True)), sessions, 0.0).run()
    base = type(of_side("ours", setup_of(asynchronous=True)))

    class Derived(base):  # type: ignore[misc, valid-type]
        """Somebody's scheduler, which may not call ours."""

        def update_from_output(self, *arguments: Any) -> Any:
            return super().update_from_output(*arguments)

    scheduler = make(setup_of(asynchronous=True), Derived)
    assert Sessions(scheduler, sessions, 0.0).run() == stock != [[*talk(t), []] for t in sessions]


def test_each_turn_has_its_own_max_tokens(side: str) -> None:
    turns = [Turn([14, 15], 1, False), Turn([16], 3, False), Turn([19], 2, False)]
    scheduler = of_side(side, setup_of(asynchronous=False))
    (answers,) = Sessions(scheduler, [turns], 0.0).run()
    assert not any(STOP in answer for answer in answers)
    assert [*map(len, answers)] == [1, *([3, 2] if side == "ours" else [1, 1]), 0]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_turn_has_its_own_stop_reason(
    side: str, asynchronous: bool, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn ends with the stop token, which is sampled behind 15; the second by length."""
    says = next([15, n] for n in range(1000) if model([15, n]) == STOP)
    more = next([n] for n in range(1000) if model([*says, n]) != STOP)
    scheduler = of_side(side, setup_of(asynchronous))
    reasons: list[tuple[Any, Any]] = []
    update = scheduler.update_from_output

    def watch(*arguments: Any) -> Any:
        received = update(*arguments)
        outputs = [output for one in received.values() for output in one.outputs]
        reasons.extend(
            (output.finish_reason, output.stop_reason) for output in outputs if output.finished
        )
        return received

    monkeypatch.setattr(scheduler, "update_from_output", watch)
    turns = [Turn(says, 1, at_once), Turn(more, 1, at_once)]
    (answers,) = Sessions(scheduler, [turns], 0.0).run()
    assert [len(answer) for answer in answers][:1] == [1]
    assert reasons[0] == (FinishReason.STOP, STOP)
    assert reasons[1] == (FinishReason.LENGTH, None if side == "ours" else STOP)
