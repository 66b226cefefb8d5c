"""The probe in real engines: its records are complete, add up, and change nothing.

The engines are pristine ones with the probe as a plugin and overlaid ones, on the CPU: with the
client in the engine's process, with the client in its own, and scheduled asynchronously on a
simulated device.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.probed import LENGTH
from probe import engines
from probe.records import Process
from support import asynchronous
from support.engine import PreloadedEngine, at_once
from support.sites import REPO

pytestmark = pytest.mark.slow

PROGRAM = REPO / "tests" / "engine" / "probed.py"
PLUGIN = REPO / "scripts" / "probe" / "plugin"

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
    assert count > 40
    assert miscounted(processes["rank0"], processes["engine0"], count) == []


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
    assert recorded[LATE[0]].tokens == recorded[LATE[1]].tokens
    assert stock["get_output"] > 0
    assert overlaid["output"] > 0
    assert "output" not in stock
    assert not {"get_output", "update_async_output_token_ids"} & overlaid.keys()
    for name in LATE:
        assert "get_output" in recorded[name].processes["rank0"].waits()
