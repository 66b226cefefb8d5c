"""The probe in real engines: its records are complete, add up, and change nothing.

The engines are pristine ones with the probe as a plugin and overlaid ones, on the CPU: with the
client in the engine's process, with the client in its own, and scheduled asynchronously on a
simulated device. The client's clock is the reference.
"""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.probed import LENGTH
from probe import engines, table, trace_events
from probe.records import PARTS, Process
from support import asynchronous
from support.engine import PreloadedEngine, at_once
from support.sites import REPO

pytestmark = pytest.mark.slow

PROGRAM = REPO / "tests" / "engine" / "probed.py"
PLUGIN = REPO / "scripts" / "probe" / "plugin"
#: The first steps compile and warm up, and are not compared.
STEPS = 30

OF_THE_CORE = {"schedule", "update_from_output"}
SYNCHRONOUS = {"execute_model", "sample_tokens", "output"}
ASYNCHRONOUS = {*SYNCHRONOUS, "get_output", "fence"}

ALIKE = ["plugin", "overlaid, apart"]
LATE = ["plugin, asynchronous", "overlaid, asynchronous"]


class Recorded(NamedTuple):
    """A run: its tokens, the client's times, the probe's records by process, and the log."""

    tokens: list[list[int]]
    stamps: list[int]
    processes: dict[str, Process]
    log: str


@pytest.fixture(scope="module")
def recorded(
    folder: Path, stock: PreloadedEngine, overlaid: PreloadedEngine
) -> dict[str, Recorded]:
    """Return all runs, by name."""
    device = asynchronous.announce(folder / "device", asynchronous.register)

    def result(name: str) -> Recorded:
        probe = folder / f"{name}.probe"
        side, _, how = name.partition(", ")
        environment = {} if side == "off" else {"VLLM_READINESS_PROBE": str(probe)}
        if how == "apart":
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        arguments = [how] if how == "asynchronous" else []
        paths = [device] * len(arguments) + [PLUGIN] * (side == "plugin")
        engine = overlaid if side == "overlaid" else stock
        run = engine.start(PROGRAM, arguments, paths, environment)
        output = run.finish()
        if side == "off":
            assert not [*folder.glob("off.probe*")]
        processes = [] if side == "off" else engines.engine(probe)[0]
        by_label = {process.label: process for process in processes}
        return Recorded(output["tokens"], output["stamps"], by_label, run.text())

    names = ["off", *ALIKE, *LATE]
    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        return dict(zip(names, pool.map(result, names), strict=True))


def kinds(process: Process) -> set[str]:
    return {span.kind for span in process.spans}


@pytest.mark.parametrize("name", ALIKE)
def test_workers_and_cores_record_the_same_kinds_wherever_they_run(
    recorded: dict[str, Recorded], name: str
) -> None:
    processes = recorded[name].processes
    assert {label: kinds(process) for label, process in processes.items()} == {
        "rank0": SYNCHRONOUS,
        "engine0": OF_THE_CORE,
    }


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_vllm_knows_the_variable(recorded: dict[str, Recorded], name: str) -> None:
    """Each engine refuses variables that it does not know."""
    assert "Unknown vLLM environment variable" not in recorded[name].log
    overlaid = name.startswith("overlaid")
    for process in recorded[name].processes.values():
        assert bool(process.header["overlay"]) == bool(process.header["digest"]) == overlaid
        assert process.header["lost"] == 0


def test_the_tokens_are_those_without_the_probe(recorded: dict[str, Recorded]) -> None:
    without = recorded["off"].tokens
    assert recorded["plugin"].tokens == without
    assert {len(tokens) for tokens in without} == {LENGTH}
    assert len({tuple(tokens) for tokens in without}) > 1
    assert not recorded["off"].processes


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_every_step_is_recorded_once(recorded: dict[str, Recorded], name: str) -> None:
    processes, count = recorded[name].processes, len(recorded[name].stamps)
    assert miscounted(processes["rank0"], processes["engine0"], count) == []


@pytest.mark.parametrize("name", ALIKE)
def test_the_client_gets_each_output_between_its_step_and_the_next(
    recorded: dict[str, Recorded], name: str
) -> None:
    """Another process may get it only after the next step has begun."""
    worker, stamps = recorded[name].processes["rank0"], recorded[name].stamps
    assert out_of_order(worker, stamps, in_process=name == "plugin") == []


@pytest.mark.parametrize("name", ALIKE)
def test_the_cores_parts_fit_between_the_workers(recorded: dict[str, Recorded], name: str) -> None:
    """The core's parts fit into the part of a worker's steps that is outside the worker's."""
    worker, core = (recorded[name].processes[label] for label in ("rank0", "engine0"))
    assert all(core.of(kind) for kind in OF_THE_CORE)
    steps = worker.steps()[-STEPS:]
    window = core.within(steps[0].began, steps[-1].ended)
    theirs = sum(span.length for span in window.spans if span.kind in PARTS)
    assert 0 < theirs < sum(step.parts["outside"] for step in steps)


def miscounted(worker: Process, core: Process, steps: int) -> list[str]:
    """Return the kinds that do not have exactly one record a step."""
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
    """Return the steps that end after the client's stamp of them, or are followed too early.

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


@pytest.mark.parametrize("name", LATE)
def test_asynchronously_another_thread_takes_the_output(
    recorded: dict[str, Recorded], name: str
) -> None:
    worker = recorded[name].processes["rank0"]
    assert kinds(worker) == ASYNCHRONOUS
    taken = worker.of("get_output")
    assert [span.step for span in taken] == list(range(1, len(taken) + 1))
    (runs,) = {span.thread for span in worker.of("execute_model")}
    (takes,) = {span.thread for span in taken}
    assert runs != takes


def test_waits_are_named_by_function_on_stock_and_by_owner_on_the_overlay(
    recorded: dict[str, Recorded],
) -> None:
    stock, overlaid = (
        Counter(span.owner for span in recorded[name].processes["rank0"].of("fence"))
        for name in LATE
    )
    assert stock["get_output"] > 0
    assert overlaid["output"] > 0
    assert "output" not in stock
    assert not {"get_output", "update_async_output_token_ids"} & overlaid.keys()
    for name in LATE:
        assert "get_output" in recorded[name].processes["rank0"].waits()


def test_both_give_the_same_tokens(recorded: dict[str, Recorded]) -> None:
    first, second = (recorded[name].tokens for name in LATE)
    assert first == second


@pytest.mark.parametrize("name", [*ALIKE, *LATE])
def test_tables_and_traces_can_be_made(recorded: dict[str, Recorded], name: str) -> None:
    processes = list(recorded[name].processes.values())
    text = table.text(processes)
    assert "sample_tokens" in text
    assert "between outputs" in text
    assert all(step.parts["outside"] >= 0 for process in processes for step in process.steps())
    slices = [event for event in trace_events.events(processes) if event["ph"] == "X"]
    spans = [span for process in processes for span in process.spans]
    assert len(slices) == sum(span.kind != "output" for span in spans)


def test_runs_have_enough_steps(recorded: dict[str, Recorded]) -> None:
    assert all(len(run.stamps) > STEPS + 10 for run in recorded.values())
