"""The probe in real engines: what it records, that it adds up, and that it changes nothing.

Pristine vLLM with the probe as a plugin, and an overlaid one with its own, on the CPU: with
the client in the engine's process and in one of its own, and scheduled asynchronously on a
simulated device. The clock that the probe is held to is the client's.
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.probed import LENGTH
from overlay.errors import Exit
from probe import records, table, trace
from probe.records import PARTS, Process, Span
from support import asynchronous
from support.engine import Engine, Run, at_once
from support.sites import REPO, run

PROGRAM = REPO / "tests" / "engine" / "probed.py"
PLUGIN = REPO / "scripts" / "probe" / "plugin"
#: The first steps compile and warm up, and are not compared.
STEPS = 60

OF_THE_CORE = {"schedule", "update_from_output"}
SYNCHRONOUS = {"execute_model", "sample_tokens", "output"}
ASYNCHRONOUS = {*SYNCHRONOUS, "get_output", "fence"}


class Ran(NamedTuple):
    """One run: its results, what the probe recorded by process, and its log."""

    tokens: list[list[int]]
    stamps: list[int]
    processes: dict[str, Process]
    log: str


@pytest.fixture(scope="module")
def ran() -> Iterator[dict[str, Ran]]:
    """All the runs, by name."""
    folder = Path(tempfile.mkdtemp(prefix="probe-", dir=REPO / "build"))
    stock, overlaid = (Engine(folder / side, forking=True) for side in ("stock", "overlaid"))
    applied = run("apply", "--force", "--site", overlaid.site, "--python", sys.executable)
    assert applied.returncode == Exit.DONE
    device = asynchronous.announce(folder / "device", asynchronous.register)
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    simulated: tuple[list[str], list[Path]] = (["asynchronous"], [REPO / "tests", device])

    def result(
        name: str,
        engine: Engine,
        arguments: list[str],
        paths: list[Path],
        environment: dict[str, str],
    ) -> Ran:
        probe = folder / f"{name}.probe"
        if name != "off":
            environment = {**environment, "VLLM_READINESS_PROBE": str(probe)}
        started: Run = engine.start(PROGRAM, arguments, paths, **environment)
        found = started.finish()
        processes = records.engine(probe)[0] if name != "off" else []
        if name == "off":
            assert not [*folder.glob("off.probe*")]
        by_label = {each.label: each for each in processes}
        return Ran(found["tokens"], found["stamps"], by_label, started.text())

    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        started = {
            name: pool.submit(result, name, engine, *given, environment)
            for name, engine, given, environment in (
                ("plugin", stock, ([], [PLUGIN]), {}),
                ("overlaid, apart", overlaid, ([], []), apart),
                ("plugin, apart", stock, ([], [PLUGIN]), apart),
                ("off", stock, ([], []), {}),
                ("plugin, asynchronous", stock, (simulated[0], [*simulated[1], PLUGIN]), {}),
                ("overlaid, asynchronous", overlaid, simulated, {}),
            )
        }
        yield {name: each.result() for name, each in started.items()}
    shutil.rmtree(folder)


def kinds(process: Process) -> set[str]:
    return {span.kind for span in process.spans}


APART = ["plugin, apart", "overlaid, apart"]
ALIKE = ["plugin", *APART]
LATE = ["plugin, asynchronous", "overlaid, asynchronous"]


@pytest.mark.parametrize("name", ALIKE)
def test_workers_and_cores_record_the_same_kinds_wherever_they_run(
    ran: dict[str, Ran], name: str
) -> None:
    processes = ran[name].processes
    assert {label: kinds(each) for label, each in processes.items()} == {
        "rank0": SYNCHRONOUS,
        "engine0": OF_THE_CORE,
    }


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_vllm_knows_the_variable(ran: dict[str, Ran], name: str) -> None:
    """Each engine was told to refuse those that it does not know."""
    assert "Unknown vLLM environment variable" not in ran[name].log
    overlaid = name.startswith("overlaid")
    for process in ran[name].processes.values():
        assert bool(process.header["overlay"]) == bool(process.header["digest"]) == overlaid
        assert process.header["lost"] == 0


def test_the_tokens_are_those_without_the_probe(ran: dict[str, Ran]) -> None:
    without = ran["off"].tokens
    assert ran["plugin"].tokens == without
    assert {len(tokens) for tokens in without} == {LENGTH}
    assert len({tuple(tokens) for tokens in without}) > 1
    assert not ran["off"].processes


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_every_step_is_there_once(ran: dict[str, Ran], name: str) -> None:
    processes, count = ran[name].processes, len(ran[name].stamps)
    assert counted(processes["rank0"], processes["engine0"], count) == []


@pytest.mark.parametrize("name", ALIKE)
def test_the_client_gets_each_output_between_its_step_and_the_next(
    ran: dict[str, Ran], name: str
) -> None:
    """Another process may get it only after the next step has begun."""
    worker, stamps = ran[name].processes["rank0"], ran[name].stamps
    assert out_of_order(worker, stamps, in_process=name == "plugin") == []


@pytest.mark.parametrize("name", ALIKE)
def test_the_core_is_at_work_while_the_worker_does_nothing_that_is_known(
    ran: dict[str, Ran], name: str
) -> None:
    """Its parts lie in what a worker's step has outside of its own."""
    worker, core = (ran[name].processes[label] for label in ("rank0", "engine0"))
    for kind in OF_THE_CORE:
        lengths = [span.length for span in core.of(kind)]
        assert lengths
    steps = worker.steps()[-STEPS:]
    window = core.within(steps[0].began, steps[-1].ended)
    theirs = sum(span.length for span in window.spans if span.kind in PARTS)
    assert 0 < theirs < sum(step.parts["outside"] for step in steps)


# What is planted must show.


def counted(worker: Process, core: Process, steps: int) -> list[str]:
    """The kinds of which there are not as many records as steps, each step's once."""
    wrong = []
    for kind in ("execute_model", "sample_tokens"):
        numbers = [span.step for span in worker.of(kind)]
        if numbers != list(range(1, steps + 1)):
            wrong.append(kind)
    for kind in OF_THE_CORE:
        # Asynchronously, one more may have been scheduled, for requests that had ended.
        if not 0 <= len(core.of(kind)) - steps <= 2:
            wrong.append(kind)
    if len(worker.of("output")) != steps - 1:
        wrong.append("output")
    return wrong


def out_of_order(worker: Process, stamps: list[int], in_process: bool = True) -> list[int]:
    """The steps that end after the client's stamp of them, or are followed too early.

    An order of events does not depend on the machine's load, as durations would.
    """
    began = {span.step: span.began for span in worker.of("execute_model")}
    ended = {span.step: span.ended for span in worker.of("sample_tokens")}
    return [
        number
        for number in range(1, len(stamps) + 1)
        if ended[number] > stamps[number - 1]
        or (in_process and stamps[number - 1] > began.get(number + 1, sys.maxsize))
    ]


def total(worker: Process) -> int:
    """The nanoseconds of all parts of all steps."""
    return sum(sum(step.parts.values()) for step in worker.steps())


def changed(process: Process, spans: list[Span]) -> Process:
    return Process(process.path, process.header, spans)


def test_a_lost_record_shows(ran: dict[str, Ran]) -> None:
    worker, core = (ran["plugin"].processes[label] for label in ("rank0", "engine0"))
    stamps = ran["plugin"].stamps
    for kind in SYNCHRONOUS:
        lost = worker.of(kind)[-STEPS // 2]
        without = changed(worker, [span for span in worker.spans if span is not lost])
        assert counted(without, core, len(stamps)) == [kind]
    for kind in OF_THE_CORE:
        fewer = changed(core, [span for span in core.spans if span is not core.of(kind)[7]])
        assert counted(worker, fewer, len(stamps)) == [kind]


def test_a_doubled_record_shows(ran: dict[str, Ran]) -> None:
    worker, core = (ran["plugin"].processes[label] for label in ("rank0", "engine0"))
    stamps = ran["plugin"].stamps
    for kind in SYNCHRONOUS:
        twice = worker.of(kind)[-STEPS // 2]
        doubled = changed(worker, [*worker.spans, twice])
        assert counted(doubled, core, len(stamps)) == [kind]
        # It is not taken for another step's time.
        lengths = [
            [sum(step.parts.values()) for step in each.steps()] for each in (worker, doubled)
        ]
        assert sum(lengths[0]) == sum(lengths[1])


def test_a_wrong_clock_shows(ran: dict[str, Ran]) -> None:
    worker, stamps = ran["plugin"].processes["rank0"], ran["plugin"].stamps
    fast = [
        span._replace(began=span.began * 21 // 20, ended=span.ended * 21 // 20)
        for span in worker.spans
    ]
    assert out_of_order(changed(worker, fast), stamps)
    tick = 16_000_000  # such as some clocks have
    coarse = [
        span._replace(began=span.began // tick * tick, ended=span.ended // tick * tick)
        for span in worker.spans
    ]
    assert out_of_order(changed(worker, coarse), stamps)


# Asynchronously.


@pytest.mark.parametrize("name", LATE)
def test_an_output_is_taken_beside_the_steps(ran: dict[str, Ran], name: str) -> None:
    worker = ran[name].processes["rank0"]
    assert kinds(worker) == ASYNCHRONOUS
    taken = worker.of("get_output")
    assert [span.step for span in taken] == list(range(1, len(taken) + 1))
    both = ("execute_model", "get_output")
    threads = [{span.thread for span in worker.of(kind)} for kind in both]
    assert [len(each) for each in threads] == [1, 1]
    assert threads[0] != threads[1]


def test_stocks_waits_bear_the_name_of_the_function_and_the_overlays_their_owners(
    ran: dict[str, Ran],
) -> None:
    stock, overlaid = (
        Counter(span.owner for span in ran[name].processes["rank0"].of("fence")) for name in LATE
    )
    assert stock["get_output"] > 0
    assert overlaid["output"] > 0
    assert "output" not in stock
    assert not {"get_output", "update_async_output_token_ids"} & overlaid.keys()
    for name in LATE:
        assert "get_output" in ran[name].processes["rank0"].waits()


def test_both_give_the_same_tokens(ran: dict[str, Ran]) -> None:
    first, second = (ran[name].tokens for name in LATE)
    assert first == second


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_tables_and_traces_can_be_made(ran: dict[str, Ran], name: str) -> None:
    processes = list(ran[name].processes.values())
    text = table.text(processes)
    assert "sample_tokens" in text
    assert "between outputs" in text
    assert all(step.parts["outside"] >= 0 for each in processes for step in each.steps())
    slices = [event for event in trace.events(processes) if event["ph"] == "X"]
    assert len(slices) == sum(span.kind != "output" for each in processes for span in each.spans)


def test_there_were_steps_enough(ran: dict[str, Ran]) -> None:
    assert all(len(each.stamps) > STEPS + 10 for each in ran.values())
