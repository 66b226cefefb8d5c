"""The features schedule and update-outputs: every decision and every state is upstream's.

See :mod:`support.scheduling`. Setups, requests and events are drawn.
"""

from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import draws
from support.scheduling import GROUPS, EngineDeadError, Lockstep, Setup
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.interface import PauseState

#: Optional parameters of a request, each with the values that it may have.
SAMPLING: dict[str, list[Any]] = {
    "min_tokens": [2, 6],
    "stop_token_ids": [[1, 2]],
    "logprobs": [0, 2],
    "prompt_logprobs": [0],
    "repetition_detection": [RepetitionDetectionParams(3, 1, 2)],
}
OPTIONS: dict[str, list[Any]] = {
    "family": [0, 1],
    "lora": [1, 2, 3],
    "grammar": [True],
    "priority": [1, 2],
    "client": [1],
    "resumable": [True],
    "eos": [True],
}
#: Events between two steps, and how often each comes.
EVENTS = {"abort": 4, "process": 4, "pause": 2, "turn": 4, "close": 2, "reset": 3, "nothing": 18}


@st.composite
def setups(draw: Any) -> Setup:
    """Draw the options of the schedulers."""
    asynchronous = draw(st.booleans())
    drafts = draw(st.sampled_from([0, 0, 1, 3]))
    groups = draw(st.sampled_from(["full", "full", "full", *GROUPS]))
    pipeline = draw(st.integers(0, 3)) == 3
    return Setup(
        asynchronous=asynchronous,
        in_flight=draw(st.sampled_from([2, 2, 3, 4])) if asynchronous or pipeline else 1,
        caching=draw(st.booleans()) and groups != "hybrid",
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])),
        groups=groups,
        blocks=draw(st.sampled_from([24, 40, 90])),
        seqs=draw(st.sampled_from([1, 3, 6, 10, 10])),
        budget=draw(st.sampled_from([10, 10, 24, 64])),
        length=draw(st.sampled_from([32, 64])),
        drafts=drafts,
        lookahead=draw(st.booleans()),
        threshold=draw(st.sampled_from([0, 0, 5])),
        chunked=draw(st.integers(0, 4)) > 0,
        log_stats=draw(st.booleans()),
        clients=draw(st.booleans()),
        events=draw(st.booleans()),
        loras=draw(st.booleans()),
        second_runner=draw(st.booleans()),
        pipeline=pipeline,
        words=draw(st.sampled_from(["", "", "-fixes", "-schedule", "-update-outputs"])),
    )


class Traffic:
    """Requests that come and go.

    Args:
        setup: options of the schedulers.
        seed: of all that is drawn here.
        odd: chance of each optional parameter of a request.
    """

    def __init__(self, setup: Setup, seed: int, odd: float) -> None:
        self.lockstep = Lockstep(setup, seed)
        self.setup, self.odd = setup, odd
        self.chance = Random(seed)
        self.sessions: list[str] = []

    def run(self, steps: int) -> Lockstep:
        """Keep the batch full for a number of steps, and let all requests end."""
        with self.lockstep.clocked(), suppress(EngineDeadError):
            for _ in range(steps):
                if len(self.names) < self.setup.seqs + 1 and self.chance.random() < 0.5:
                    self.add()
                (event,) = self.chance.choices([*EVENTS], [*EVENTS.values()])
                if self.chance.random() < 4 * self.odd:
                    getattr(self, event)()
                self.lockstep.step()
            for name in self.sessions:
                if name in self.names:
                    self.lockstep.add(1, 1, name=name)
            self.lockstep.finish()
        return self.lockstep

    @property
    def names(self) -> list[str]:
        """Ids of the requests that have not ended."""
        return [*self.lockstep.sides[0].requests]

    def add(self) -> None:
        """Add a request."""
        drawn = {
            name: self.chance.choice(values)
            for name, values in (SAMPLING | OPTIONS).items()
            if self.chance.random() < self.odd and (name != "lora" or self.setup.loras)
        }
        most = self.chance.randint(1, 40)
        if "min_tokens" in drawn:
            drawn["min_tokens"] = min(drawn["min_tokens"], most)
        prompt = min(self.chance.randint(1, 30), self.setup.length - 2)
        name = self.lockstep.add(prompt, most, **drawn)
        if "resumable" in drawn:
            self.sessions.append(name)

    def abort(self) -> None:
        """Abort a request."""
        if self.names:
            self.lockstep.abort(self.chance.choice(self.names))

    def reset(self) -> None:
        """Reset the prefix cache, perhaps with the running requests."""
        self.lockstep.reset(self.chance.random() < 0.7)

    def process(self) -> None:
        """Process the output of a step early."""
        self.lockstep.process()

    def pause(self) -> None:
        """Schedule a step while nothing, or nothing new, may be scheduled."""
        self.lockstep.pause(self.chance.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
        self.lockstep.step()
        self.lockstep.pause(PauseState.UNPAUSED)

    def turn(self, last: bool = False) -> None:
        """Continue a session."""
        names = [name for name in self.sessions if name in self.names]
        if names:
            more = 1 if last else self.chance.randint(1, 9)
            self.lockstep.add(more, 5, name=self.chance.choice(names), resumable=not last)

    def close(self) -> None:
        """End a session."""
        self.turn(last=True)

    def nothing(self) -> None:
        """Go on."""


CASES = {
    "setup": setups(),
    "seed": st.integers(0, 999),
    "odd": st.sampled_from([0.0, 0.05, 0.1, 0.3]),
    "steps": st.sampled_from([20, 40, 60, 80]),
}


@given(**CASES)
@draws(30)
def test_decisions_and_states_are_upstreams(
    setup: Setup, seed: int, odd: float, steps: int
) -> None:
    Traffic(setup, seed, odd).run(steps)


@pytest.mark.slow
@given(**CASES)
@settings(max_examples=300)
def test_decisions_and_states_are_upstreams_in_300_runs(
    setup: Setup, seed: int, odd: float, steps: int
) -> None:
    Traffic(setup, seed, odd).run(steps)
