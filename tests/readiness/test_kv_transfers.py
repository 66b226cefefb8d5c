"""The fix kv-transfers: requests, their KV blocks and their KV transfers may end in any order.

The scheduler is a real one, over a worker whose tokens are right only where all KV before them is.
The pinned scheduler has the faults, which are asserted as well: with the fix off ours has them.
"""

import os
from collections.abc import Mapping
from random import Random
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import draws
from support.loads import Connector, Loads, prompt
from support.scheduling import BLOCK, Setup, of_side
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.readiness.engine import switch
from vllm.v1.request import RequestStatus

FIX = "kv-transfers"
HANDED_OVER = {"do_remote_decode": True}


class Transferring(Connector):
    """A connector that also sends.

    Attributes:
        sends: ids of the requests whose blocks are sent when they have finished.
        handed: by finished request, how many tokens the blocks hold that the connector got.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sends: set[str] = set()
        self.handed: dict[str, int] = {}

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        """Take the blocks of a request."""
        if request.status != RequestStatus.FINISHED_ABORTED:
            self.handed[request.request_id] = len(blocks) * BLOCK
        return request.request_id in self.sends, None


class Transfers(Loads):
    """An engine's loop. The worker reports transfers as :attr:`reports` names them.

    Attributes:
        reports: fields of the next output of a connector.
        parameters: kv_transfer_params of new requests.
    """

    def __init__(self, side: str, in_flight: int | None = None, **options: Any) -> None:
        setup = Setup(**{"seqs": 6, "blocks": 90, "length": 96, **options})
        scheduler = of_side(side, setup)
        super().__init__(scheduler, in_flight or 1 + setup.asynchronous, seed=0, failing=0)
        self.connector: Transferring = Transferring()
        self.scheduler.connector = self.connector
        self.reports: dict[str, set[str]] = {}
        self.late = False
        self.parameters: Mapping[str, bool] | None = HANDED_OVER

    def load(self, *arguments: Any, **options: Any) -> str:
        """Add a request."""
        name = super().load(*arguments, **options)
        self.scheduler.requests[name].kv_transfer_params = self.parameters
        return name

    def report(self, kind: str, name: str) -> None:
        """Report a transfer as finished with the next step that runs."""
        self.reports.setdefault(kind, set()).add(name)

    def run(self, steps: int) -> None:
        """Make steps."""
        for _ in range(steps):
            self.step()

    def held(self) -> int:
        """Return how many blocks are not free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def _run(self, scheduled: Any) -> Any:
        output = super()._run(scheduled)
        received = output.kv_connector_output.finished_recving
        reports, self.reports = self.reports, {}
        if not self.late:
            reports["finished_recving"] = reports.get("finished_recving", set()) | received
        output.kv_connector_output = KVConnectorOutput(**reports)
        return output


def outcome(loop: Transfers) -> Any:
    """Make 40 steps, and return the faults, or the kind of error."""
    try:
        loop.run(40)
    except (AssertionError, KeyError) as error:
        return type(error)
    return loop.faults()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["finished_recving", "finished_sending"])
@pytest.mark.parametrize("state", ["unknown", "running", "waiting", "freed"])
def test_a_report_of_a_request_that_awaits_none(
    side: str, state: str, asynchronous: bool, kind: str
) -> None:
    """A load is reported twice, or blocks are sent before the request has finished."""
    seqs = 1 if state == "waiting" else 6
    loop = Transfers(side, asynchronous=asynchronous, seqs=seqs)
    loop.late = state == "freed"
    loop.load(prompt(9, -50), 12, 0)
    name = loop.load(prompt(22), 9, 4, later=True)
    loop.run(2)
    if state == "freed":  # it is aborted while it loads
        loop.abort(name)
        loop.report("finished_recving", name)
    loop.run(3)
    assert (name in loop.scheduler.requests) == (state != "freed")
    running = [each.request_id for each in loop.scheduler.running]
    assert (name in running) == (state in ("unknown", "running"))
    loop.report(kind, "unknown" if state == "unknown" else name)
    assert outcome(loop) == ([] if side == "ours" else AssertionError)
    assert side != "ours" or loop.held() == 0


def crowded(side: str, parameters: Mapping[str, bool] | None = HANDED_OVER) -> Transfers:
    """Prompts that end with their first token, among requests that outgrow the KV cache."""
    loop = Transfers(side, blocks=14, caching=False)
    loop.parameters = parameters
    for number in range(60):
        if number % 12 == 0:
            loop.load(prompt(8 + number % 5), 20, 0)
            loop.load(prompt(11 + number % 7), 20, 0)
        if number % 2 == 0:
            loop.load(prompt(7), 1, 0)
        loop.step()
    loop.run(300)
    return loop


def without_blocks(loop: Transfers) -> list[str]:
    """Return the requests that have finished without blocks for their prompt."""
    return [name for name, count in loop.connector.handed.items() if count < 7]


def test_the_connector_gets_the_blocks(side: str) -> None:
    """A prompt is preempted while its only step is in flight."""
    loop = crowded(side)
    assert loop.faults() == []
    assert not loop.scheduler.requests
    assert loop.connector.handed.keys() == loop.added.keys()
    assert (without_blocks(loop) == []) == (side == "ours")


@pytest.mark.parametrize("parameters", [None, {}, {"do_remote_decode": False}])
def test_a_request_that_hands_nothing_over_keeps_its_output(
    parameters: dict[str, bool] | None,
) -> None:
    """No token is computed again: unseeded sampling would draw another."""
    loop = crowded("ours", parameters)
    assert loop.faults() == []
    assert without_blocks(loop)


def closed_loop(words: str, seed: int, steps: int, **options: Any) -> Transfers:
    """Run a constant number of requests; a share of them loads KV, also after a preemption."""
    chance = Random(seed)
    clients, share = chance.randint(3, 9), chance.choice([0.1, 0.5, 1])
    later = chance.random() < 0.5
    setup = {"seqs": 8, "blocks": chance.choice([13, 20, 40]), "caching": False, **options}
    with mock.patch.dict(os.environ, {switch.NAME: words}):
        loop = Transfers("ours", **setup)
        loop.parameters = None
        for number in range(steps):
            while len(loop.scheduler.requests) < clients:
                loads = chance.random() < share
                count = chance.randint(20, 45) if loads else chance.randint(3, 15)
                new = prompt(count, -50 - number)
                name = loop.load(new, chance.randint(2, 12), 20 * loads, later)
                loop.scheduler.requests[name].priority = chance.randint(0, 2)
            loop.step()
    return loop


@given(
    asynchronous=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    seed=st.integers(0, 9999),
)
@draws(40)
def test_requests_are_admitted_as_without_the_fix(
    asynchronous: bool, policy: str, seed: int
) -> None:
    """Loads, the requests behind them and preempted replies run in the same steps."""
    options = {"asynchronous": asynchronous, "policy": policy}
    loops = [closed_loop(words, seed, 150, **options) for words in ("on", f"-{FIX}")]
    assert loops[0].scheduled == loops[1].scheduled
    assert loops[0].delivered == loops[1].delivered


@given(
    asynchronous=st.booleans(),
    in_flight=st.sampled_from([None, 3]),
    blocks=st.sampled_from([90, 120]),  # on stock, loads may hold all blocks for ever
    caching=st.booleans(),
    seed=st.integers(0, 999),
)
@draws(60)
def test_transfers_end_in_any_order(
    asynchronous: bool, in_flight: int | None, blocks: int, caching: bool, seed: int
) -> None:
    """Transfers are reported late and twice, and requests are aborted."""
    # Three stages need asynchronous scheduling: else stock schedules preempted requests too early.
    loop = Transfers(
        "ours",
        in_flight if asynchronous else None,
        asynchronous=asynchronous,
        blocks=blocks,
        caching=caching,
    )
    loop.late = True
    chance = loop.chance
    chance.seed(seed)
    for number in range(80):
        if number < 60 and chance.random() < 0.4:
            first = chance.choice([-50, -60, -70 - number])
            most, count = chance.choice([0, 3, 5]), chance.choice([7, 22])
            name = loop.load(
                prompt(count, first), chance.randint(1, 9), most, chance.random() < 0.6
            )
            if chance.random() < 0.4:
                loop.connector.sends.add(name)
        names = [*loop.added]
        if names and chance.random() < 0.15:
            loop.abort(chance.choice(names))
        if names and chance.random() < 0.2:  # an early or a second report
            name = chance.choice(names)
            request = loop.scheduler.requests.get(name)
            loads = request and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if not loads and not (request and request.is_finished()):
                loop.report(chance.choice(["finished_recving", "finished_sending"]), name)
        loop.step()
        if chance.random() < 0.3:
            settle(loop)
    for _ in range(200):
        settle(loop)
        loop.step()
        if not loop.scheduler.requests and not loop.queue:
            break
    assert loop.faults() == []
    assert not loop.scheduler.requests
    assert loop.held() == 0


def settle(loop: Transfers) -> None:
    """Report all transfers that are under way."""
    for name, request in loop.scheduler.requests.items():
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            loop.report("finished_recving", name)
        elif request.is_finished():
            loop.report("finished_recving", name)
            loop.report("finished_sending", name)
