"""The benchmark of the host's work: engines and schedulers of several sides in one process."""

import builtins
import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import host
from bench.harness import manifest
from bench.harness.run import Job
from bench.results.run_file import load
from bench.results.slices import grouped
from bench.runners import cases, child, scheduler
from bench.runners.cases import KINDS, SIDES, Case, Load
from bench.runners.engine import doubts
from bench.runners.twins import Package, Twins, twin_name
from support import forked
from support.asynchronous import announce
from support.benches import bench
from support.sites import OVERLAY, REPO, UPSTREAM
from support.slow_runner import SLOWER, slow

CHANGED = sorted(OVERLAY.pin.upstream)
RUNNER = "vllm.v1.worker.gpu_model_runner"


@pytest.mark.slow
def test_a_planted_cost_is_found_in_its_parts_and_on_its_side_alone(tmp_path: Path) -> None:
    done = bench(
        *("host", tmp_path / "out", "--rounds", "1", "--kinds", "ngram 1k"),
        *("--batches", "4", "--steps", "10"),
        paths=[announce(tmp_path / "plugins", slow), REPO / "tests"],
        environment=forked.ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = load(tmp_path / "out" / "run.json")
    assert run["complete"]
    assert run["problems"] == list(manifest.differences(run)) == []
    groups = grouped(run["slices"])
    assert len(groups) == 2 * 2  # cases and pairs
    for (_, _, sides), of in groups.items():
        assert [one["order"] for one in of] == [0, 1]
        assert [one["problems"] for one in of] == [[], []]
        slices = [one["figures"][side] for one in of for side in sides]
        for figures in slices:
            assert list(figures) == [f"{p} {q}, us" for p in child.PARTS for q in ("p50", "p99")]
            assert min(figures.values()) > 0
        first, second, *other_order = slices
        # Both orders together: other processes may slow down one engine of one order.
        excess = {
            part: sum(
                one[f"{part} p50, us"] - two[f"{part} p50, us"]
                for one, two in [(first, second), other_order]
            )
            for part in child.PARTS
        }
        slower = {part for part, time in excess.items() if time > SLOWER * 1e6}
        planted = {"execute_model", "_prepare_inputs"} if sides[0] == "overlaid" else set()
        assert slower == planted


@pytest.mark.slow
def test_both_schedulers_make_the_same_decisions_in_every_kind_of_step(tmp_path: Path) -> None:
    done = bench("host", tmp_path, "--rounds", "1", "--kinds", "scheduler 32", "--steps", "20")
    assert done.returncode == 0, done.stderr[-4000:]
    run = load(tmp_path / "run.json")
    assert list(manifest.differences(run)) == []
    assert [one["sides"] for one in run["slices"]] == [
        ["again", "stock"],
        ["overlaid", "stock"],
    ] * 2
    for one in run["slices"]:
        assert one["problems"] == []
        for figures in one["figures"].values():
            for function in ("schedule", "update_from_output"):
                assert (
                    figures[f"{function} p99, same, us"] >= figures[f"{function} p50, same, us"] > 0
                )
                assert figures[f"{function} p50, mixed, us"] > 0


def step(requests: str, new: str = "", prompt: str = "") -> Any:
    tokens = {name: 7 if name == prompt else 1 for name in requests}
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_new_reqs=[*new])


def test_kinds_of_step() -> None:
    steps = scheduler.Steps()
    taken = [
        (step("ab", new="ab"), scheduler.MIXED),
        (step("ab"), scheduler.SAME),
        (step("b"), scheduler.CHANGED),
        (step("b"), scheduler.SAME),
        (step("bc", new="c"), scheduler.MIXED),
        (step("bc", prompt="c"), scheduler.MIXED),
        (step("cb"), scheduler.SAME),
        (step("cd"), scheduler.CHANGED),
        (step(""), None),
        (step("bc"), scheduler.CHANGED),
    ]
    assert [steps.kind(output) for output, _ in taken] == [kind for _, kind in taken]


def test_a_scheduler_that_decides_otherwise_has_a_problem() -> None:
    result = {
        side: {"figures": {"schedule p50, same, us": 1.0}, "decisions": "same"}
        for side in scheduler.SIDES
    }
    job = Job("scheduler 32", 1)
    assert [one["problems"] for one in host._of_schedulers(job, 0, result)] == [[], []]
    result["overlaid"]["decisions"] = "other"
    found = [one["problems"] for one in host._of_schedulers(job, 0, result)]
    assert found == [[], ["overlaid and stock made different decisions"]]


def test_twins_are_what_the_overlay_changes_and_what_imports_it() -> None:
    twins = Twins(UPSTREAM, CHANGED)
    assert {RUNNER, "vllm.v1.sample.sampler", "vllm.v1.worker.gpu.model_runner"} <= twins.names
    # These import the runner, within functions as well; the CPU's worker imports its runner.
    users = ("gpu_worker", "cpu_model_runner", "cpu_worker")
    assert {f"vllm.v1.worker.{name}" for name in users} <= twins.names
    # For type checkers alone, or not at all.
    assert not {"vllm.v1.worker.worker_base", "vllm.v1.worker.workspace"} & twins.names
    assert not {"vllm.v1.core.sched.scheduler", "vllm.envs"} & twins.names


@pytest.fixture
def twins() -> Iterator[Twins]:
    """Twins of the process's vLLM, unloaded at the end."""
    twins = Twins(UPSTREAM, CHANGED)
    yield twins
    for name in twins.names:
        sys.modules.pop(twin_name(name), None)


def test_a_twin_s_imports_find_twins_early_and_late(twins: Twins) -> None:
    own, twin = importlib.import_module(RUNNER), twins.load(RUNNER)
    assert twin is twins.load(RUNNER) is importlib.import_module(twin_name(RUNNER))
    assert twin.GPUModelRunner is not own.GPUModelRunner
    for name in ("InputBatch", "Sampler", "RejectionSampler"):
        cls = getattr(twin, name)
        assert cls is not getattr(own, name)
        assert cls.__module__.rpartition(".")[2].startswith("stock_")
    assert twin.AttentionSpec is own.AttentionSpec

    def late() -> Any:
        import vllm.v1.worker.gpu_model_runner  # without "as", the name is that of vllm
        from vllm.v1.worker import gpu_input_batch

        return vllm.v1.worker.gpu_model_runner, gpu_input_batch, vllm.v1.worker.utils

    def in_twin(function: Any) -> Any:
        namespace = {**vars(twin), "__builtins__": vars(twin)["__builtins__"]}
        return type(function)(function.__code__, namespace)

    runner, batch, utils = in_twin(late)()
    assert runner is twin
    assert batch is twins.load("vllm.v1.worker.gpu_input_batch")
    assert utils is importlib.import_module("vllm.v1.worker.utils")
    assert late()[0] is own
    relative = {**vars(twin)}
    exec("from .gpu_input_batch import InputBatch as Relative", relative)
    assert relative["Relative"] is batch.InputBatch
    assert isinstance(twins._import("vllm.v1.outputs"), Package)
    assert twins._import("json") is json
    assert builtins.__import__ is not twins._import
    assert twin.__file__ == str(UPSTREAM / "vllm/v1/worker/gpu_model_runner.py")


def runner_of(module: str, **attributes: object) -> Any:
    """An object of a class of this module."""
    return type("GPUModelRunner", (), {"__module__": module, **attributes})()


def test_an_engine_that_does_not_run_its_side_is_doubted(twins: Twins) -> None:
    ours, batch = RUNNER, runner_of("vllm.v1.worker.gpu_input_batch", readiness=None)
    stock, pure = twin_name(RUNNER), runner_of("vllm.v1.worker.stock_gpu_input_batch")
    v2 = twin_name("vllm.v1.worker.gpu.model_runner")

    def told(side: str, module: str, input_batch: Any = None) -> list[str]:
        return doubts(SIDES[side], runner_of(module, input_batch=input_batch), twins)

    assert told("overlaid", ours, batch) == told("stock", stock, pure) == told("mrv2", v2) == []
    assert told("stock", ours, pure) == [f"its runner has GPUModelRunner of {ours}"]
    assert "its input_batch carries the overlay" in told("stock", stock, batch)
    assert "its input_batch does not carry the overlay" in told("overlaid", ours)
    assert told("overlaid", stock, batch) == [f"its runner has GPUModelRunner of {stock}"]
    assert told("mrv2", stock) == [f"its runner is of {stock}"]
    assert told("stock", v2) == [f"its runner is of {v2}"]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_outlast_the_steps_and_fit_the_model(kind: str) -> None:
    load = Load(kind, "tiny", [128, 1, 8, 256], 200, "")
    assert [case.name for case in load.cases] == [
        *("batch 128", "batch 1", "batch 8", "batch 128, changing", "batch 256")
    ]
    assert cases.PROMPT + load.output <= KINDS[kind].length
    assert load.blocks * 16 >= max(KINDS[kind].length, 256 * (cases.PROMPT + load.output))
    assert load.output > cases.WARMUP + load.steps
    assert KINDS[kind].sides(gpu=False) == ("stock", "overlaid", "again")
    assert ("mrv2" in KINDS[kind].sides(gpu=True)) == (KINDS[kind].drafts == 0)


def test_a_changing_batch_ends_and_begins_a_request_at_each_step() -> None:
    case, load = Case(4, changing=True), Load("sync 1k", "tiny", [4], 30, "")
    ends = Counter(
        max(0, request - 3) + cases.lifetime(case, load, request) for request in range(30)
    )
    assert [ends[step] for step in range(1, 30)] == [1] * 29
    lengths = {len(cases.prompt(case, request)) for request in range(40)}
    assert lengths == set(range(1, 17))
    assert {len(cases.prompt(Case(4), request)) for request in range(40)} == {16}


def test_engines_are_first_and_after_one_another_equally_often() -> None:
    names = tuple(SIDES)
    turns = [cases.order(turn, names) for turn in range(8)]
    assert Counter(turn[0] for turn in turns) == dict.fromkeys(names, 2)
    pairs = Counter(pair for turn in turns for pair in pairwise(turn))
    assert all(pairs[one, other] == pairs[other, one] for one, other in pairs)


def test_quantiles_are_the_median_and_the_99th_percentile() -> None:
    assert child.quantiles([float(n) for n in range(1, 102)]) == {"p50": 51.0, "p99": 100.0}


def measured(ratio: float = 0.5, noise: float = 1.02) -> dict[str, Any]:
    """One process's result, with one part."""
    times = {"stock": 100.0, "overlaid": 100 * ratio, "mrv2": 80.0, "again": 100 * noise}
    part = {name: {"p50": value, "p99": 2 * value} for name, value in times.items()}
    return {
        "device": "CPU",
        "failed": {},
        "cases": {"batch 8": {"parts": {"schedule": part}, "tokens": dict.fromkeys(SIDES, "same")}},
        "doubts": {name: list[str]() for name in SIDES},
    }


def test_a_process_gives_a_slice_for_each_pair_of_its_engines() -> None:
    found = list(host.slices(Job("sync 1k", 3), 1, measured()))
    assert [tuple(one["sides"]) for one in found] == [*host.PAIRS]
    for one in found:
        place = (one["round"], one["order"], one["engine"], one["case"], one["problems"])
        assert place == (3, 1, "sync 1k", "batch 8", [])
    assert found[1]["figures"] == {
        "overlaid": {"schedule p50, us": 50.0, "schedule p99, us": 100.0},
        "stock": {"schedule p50, us": 100.0, "schedule p99, us": 200.0},
    }
    without = measured()
    del without["doubts"]["mrv2"]
    pairs = [one["sides"][1] for one in host.slices(Job("sync 1k", 3), 1, without)]
    assert pairs == ["stock", "stock"]


def change_tokens(one: Any) -> None:
    one["cases"]["batch 8"]["tokens"]["overlaid"] = "other"


def change_tokens_of_v2(one: Any) -> None:
    one["cases"]["batch 8"]["tokens"]["mrv2"] = "other"


def doubt(one: Any) -> None:
    one["doubts"]["stock"] = ["its sampler carries the overlay"]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (change_tokens, "overlaid and stock returned different tokens"),
        (change_tokens_of_v2, ""),
        (doubt, "stock: its sampler carries the overlay"),
    ],
)
def test_problems_are_told(spoil: Any, problem: str) -> None:
    one = measured()
    spoil(one)
    found = host.slices(Job("sync 1k", 1), 0, one)
    texts = [text for each in found for text in each["problems"]]
    assert any(problem in text for text in texts) if problem else texts == []


class Faked:
    """An engine that takes no time; it notes what it is told."""

    def __init__(self, name: str, load: Load, *_: object) -> None:
        if name == "mrv2":
            raise ValueError("no such runner")
        self.name, self.asynchronous, self.runner = name, False, None
        self.tokens: Mapping[str, list[int]] = {"0": [1, 2]}

    def begin(self, case: Case) -> None:
        pass

    def step(self) -> dict[str, int]:
        return dict.fromkeys(child.PARTS, 1000)

    def end(self) -> None:
        pass

    def digest(self) -> str:
        return "same"

    def doubts(self, _: Twins) -> list[str]:
        return []


def test_results_are_written_after_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "Engine", Faked)
    monkeypatch.setattr(child, "gc", SimpleNamespace(collect=int, freeze=int, disable=int))
    written: list[list[str]] = []
    load = Load("sync 1k", "tiny", [4, 1], 5, str(UPSTREAM))
    child.measure(load, tmp_path, lambda result: written.append(list(result["cases"])))
    names = [case.name for case in load.cases]
    assert written == [names[: n + 1] for n in range(3)]


def test_a_missing_model_runner_v2_costs_its_own_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "Engine", Faked)
    arguments: Any = (Load("sync 1k", "tiny", [4], 5, ""), None, tmp_path)
    engines, failed = child._engines(tuple(SIDES), *arguments)
    assert list(engines) == ["stock", "overlaid", "again"]
    assert failed == {"mrv2": "ValueError: no such runner"}
