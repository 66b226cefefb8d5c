"""The benchmark of the host's work: stock, overlaid and Model Runner V2 in one process."""

import builtins
import importlib
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench import host, measurements
from bench.compare.intervals import Interval
from bench.reports.claims import Claims, marked
from bench.runners import calls, cases, child, figures
from bench.runners.cases import KINDS, SIDES, Case, Load
from bench.runners.engine import described
from bench.runners.twins import Package, Twins, twin_name
from support import runs
from support.asynchronous import announce
from support.benches import bench
from support.sites import OVERLAY, REPO, UPSTREAM
from support.slow_runner import SLOWER, slow

CHANGED = sorted(OVERLAY.pin.upstream)
RUNNER = "vllm.v1.worker.gpu_model_runner"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose overlaid engine has a planted cost, with drafts and without."""
    folder = tmp_path_factory.mktemp("host")
    sizes = ["--kinds", "sync 1k", "ngram 1k", "--batches", "4", "1", "--steps", "10"]
    paths = [announce(folder / "plugins", slow), REPO / "tests"]
    done = bench("host", folder / "out", "--rounds", "1", *sizes, paths=paths)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())
    return result


@pytest.mark.slow
def test_stock_and_overlaid_run_their_own_classes_and_return_the_same(run: Any) -> None:
    assert run["complete"]
    assert run["problems"] == []
    assert len(run["rounds"]) == 2
    for one in run["rounds"].values():
        assert list(one["proof"]) == ["stock", "overlaid", "stock again"]
        for side, proof in one["proof"].items():
            pinned = OVERLAY.pin.result if side == "overlaid" else OVERLAY.pin.upstream
            digests = {cls["path"]: cls["sha256"] for of in proof["classes"].values() for cls in of}
            for path in ("worker/gpu_model_runner.py", "worker/gpu_input_batch.py"):
                assert digests[f"vllm/v1/{path}"] == pinned[f"vllm/v1/{path}"]
            assert digests["vllm/v1/sample/sampler.py"] == pinned["vllm/v1/sample/sampler.py"]
            assert proof["readiness"] == (["input_batch"] if side == "overlaid" else [])
        for case in one["cases"].values():
            assert len({*case["tokens"].values()}) == 1
            assert min(case["count"].values()) > 10
            assert all(map(bool, case["drafts"].values())) == one["kind"].startswith("ngram")


@pytest.mark.slow
def test_a_planted_cost_is_found_in_its_parts_and_on_its_side_alone(run: Any) -> None:
    for one in run["rounds"].values():
        for case in one["cases"].values():
            assert list(case["parts"]) == list(figures.PARTS)
            quantiles = {
                part: {side: of[side]["p10"] for side in one["proof"]}
                for part, of in case["parts"].items()
            }
            slower = {
                part: {
                    side for side, p10 in of.items() if p10 - min(of.values()) > SLOWER / 2 * 1e6
                }
                for part, of in quantiles.items()
            }
            costly = {part: sides for part, sides in slower.items() if sides}
            assert costly == {part: {"overlaid"} for part in ("execute_model", "_prepare_inputs")}
            assert min(p10 for of in quantiles.values() for p10 in of.values()) > 0
    assert {cells[2] is None for cells in run["rows"]} == {False}
    assert {(cells[4], cells[6]) for cells in run["rows"]} == {(None, None)}


def test_twins_are_what_the_overlay_changes_and_what_imports_it() -> None:
    twins = Twins(UPSTREAM, CHANGED)
    assert {RUNNER, "vllm.v1.sample.sampler", "vllm.v1.worker.gpu.model_runner"} <= twins.names
    # These import the runner, within functions as well; the CPU's worker imports its runner.
    users = ("gpu_worker", "cpu_model_runner", "cpu_worker")
    assert {f"vllm.v1.worker.{name}" for name in users} <= twins.names
    # For type checkers alone, or not at all.
    assert not {"vllm.v1.worker.worker_base", "vllm.v1.worker.workspace"} & twins.names
    assert {"vllm/v1/core/sched/scheduler.py", "vllm/envs.py"} <= {*twins.shared}
    assert not any(path.startswith("vllm/v1/worker/") for path in twins.shared)


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
    states = {path: described(path, Path(str(t.__file__))) for path, t in twins.loaded.items()}
    assert states["vllm/v1/worker/gpu_model_runner.py"]["state"] == "pristine"
    assert {state["state"] for state in states.values()} == {"pristine", "not changed"}


@pytest.mark.parametrize("kind", KINDS)
def test_requests_outlast_the_steps_and_fit_the_model(kind: str) -> None:
    load = Load(kind, "tiny", [128, 1, 8, 256], 200, "")
    assert [case.name for case in load.cases] == [
        *("batch 128", "batch 1", "batch 8", "batch 128, changing", "batch 256")
    ]
    assert cases.PROMPT + load.output <= KINDS[kind].length
    assert load.blocks * 16 >= max(KINDS[kind].length, 256 * (cases.PROMPT + load.output))
    assert load.output > cases.WARMUP + load.steps
    assert KINDS[kind].sides(gpu=False) == ("stock", "overlaid", "stock again")
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


def test_a_summary_has_the_quantiles_of_each_engine_and_no_other() -> None:
    pace = [float(n) for n in range(1, 102)]
    summary = figures.summary({"stock": pace, "overlaid": [n / 2 for n in pace]})
    assert summary == {"stock": {"p10": 11.0, "p50": 51.0}, "overlaid": {"p10": 5.5, "p50": 25.5}}


def rounds_of(slowness: float, batches: int = 40, count: int = 5) -> list[dict[str, Any]]:
    """Rounds of two parts, every engine with the same noise; the machine's speed varies."""
    chance = random.Random(7)

    def steps(speed: float) -> list[float]:
        """Times of 200 steps; now and then one is held up."""
        return [
            speed * math.exp(chance.gauss(0, 0.15) + (chance.random() < 0.1) * chance.random())
            for _ in range(200)
        ]

    rounds = []
    for _ in range(count):
        speed = chance.choice((100.0, 110.0, 160.0))
        of = {**dict.fromkeys(SIDES, speed), "overlaid": speed * slowness}
        rounds.append(
            {
                "kind": "async 1k",
                "cases": {
                    f"batch {batch}": {
                        "parts": {
                            part: figures.summary({side: steps(of[side]) for side in SIDES})
                            for part in ("schedule", "execute_model")
                        }
                    }
                    for batch in range(batches)
                },
            }
        )
    return rounds


def ratio_of(cell: Any) -> float:
    """A cell's ratio, without its mark."""
    return float(cell[0] if isinstance(cell, list) else cell)


@pytest.mark.parametrize("quantile", figures.QUANTILES)
def test_stock_beside_itself_has_ratios_around_1(quantile: str) -> None:
    rows = [row for row in host.rows(rounds_of(1.0)) if row[1].endswith(quantile)]
    for column in figures.RATIOS:
        ratios = [ratio_of(row[host.HostRun.columns.index(column)]) for row in rows]
        assert len(ratios) == 80
        assert statistics.fmean(ratios) == pytest.approx(1.0, abs=0.01), column
        assert max(abs(ratio - 1) for ratio in ratios) < 0.1
    assert all(row[5][1] == "~" for row in rows)


def test_a_slower_side_shows_more_than_1_and_is_listed_as_slower() -> None:
    rounds = rounds_of(1.1, batches=4)
    run = {
        **runs.head("table"),
        "columns": host.HostRun.columns,
        "rows": host.rows(rounds),
        "rounds": rounds,
    }
    assert len(run["rows"]) == 16
    for row in run["rows"]:
        stock, overlaid, v2 = row[2:5]
        assert ratio_of(row[5]) == overlaid / stock > 1
        assert ratio_of(row[6]) == overlaid / v2 > 1
    assert sum(isinstance(row[5], float) for row in run["rows"]) > 8
    listed = measurements.slower({"host": run}, Claims([run]))[2:]
    cells = {tuple(line.strip("| ").split(" | ")[1:3]) for line in listed}
    assert cells == {tuple(row[:2]) for row in run["rows"]}


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


def test_cuda_calls_count_where_they_are_made() -> None:
    trace = [
        {"ph": "M", "name": "process_name"},
        event("stock: execute_model", "user_annotation", 0, 100),
        event("cudaLaunchKernel", "cuda_runtime", 10, 4),
        event("cuLaunchKernel", "cuda_driver", 11, 2),  # within the one before
        event("cuLaunchKernelEx", "cuda_driver", 20, 3),
        event(calls.APART, "user_annotation", 30, 40),
        event("cudaGraphLaunch", "cuda_runtime", 35, 30),
        event("aten::add", "cpu_op", 80, 5),
        event("cudaMemcpyAsync", "cuda_runtime", 80, 1, tid=2),  # of another thread
        event("cudaMemcpyAsync", "cuda_runtime", 90, 5),
        event("cudaDeviceSynchronize", "cuda_runtime", 110, 500),  # of nobody
        event("kernel", "kernel", 20, 30),
        event("stock: execute_model", "user_annotation", 700, 10),
        event("overlaid: execute_model", "user_annotation", 720, 10),
    ]
    assert calls.count(trace, 2) == {
        "stock: execute_model": {"calls": 1.5, "us": 6.0},
        "overlaid: execute_model": {"calls": 0.0, "us": 0.0},
    }


def test_the_profiler_sees_what_is_marked(tmp_path: Path) -> None:
    runner = SimpleNamespace(model=lambda: 1)
    runner.execute_model = lambda: 1 + runner.model()
    calls.mark(runner, "execute_model", "stock: execute_model")
    calls.mark(runner, "model", calls.APART)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert [runner.execute_model() for _ in range(2)] == [2, 2]
    profiler.export_chrome_trace(str(tmp_path / "trace"))
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    (begin, end), _ = [
        (one["ts"], one["ts"] + one["dur"])
        for one in events
        if one["name"] == "stock: execute_model"
    ]
    tid = next(one["tid"] for one in events if one["name"] == "stock: execute_model")
    events.append(event("cudaLaunchKernel", "cuda_runtime", begin, (end - begin) / 1000, tid))
    (counted,) = calls.count(events, 2).values()
    assert counted["calls"] == 0.5


def measured(ratio: float = 0.5, noise: float = 1.02, called: bool = False) -> dict[str, Any]:
    """One process's result, with one part and without Model Runner V2."""
    quantiles = {"stock": 100.0, "overlaid": 100 * ratio, "stock again": 100 * noise}
    part = {name: {"p10": value - 0.01, "p50": value} for name, value in quantiles.items()}
    case: dict[str, Any] = {"parts": {"schedule": part}, "tokens": dict.fromkeys(SIDES, "same")}
    if called:
        case["calls"] = {
            "stock: execute_model": {"calls": 20.0, "us": 60.0},
            "overlaid: execute_model": {"calls": 5.0, "us": 15.0},
        }
    return {
        "kind": "sync 1k",
        "failed": {},
        "cases": {"batch 8": case},
        "async": dict.fromkeys(SIDES, False),
        "twins": [{"path": "vllm/v1/sample/metadata.py", "state": "pristine"}],
        "proof": {name: proof(name) for name in SIDES},
    }


def proof(side: str) -> dict[str, Any]:
    state = "pristine" if SIDES[side].stock else "overlaid"
    classes = {
        one: [{"class": one, "of": "stock", "path": path, "state": state}]
        for one, path in host._FILES[SIDES[side].version].items()
    }
    return {"classes": classes, "readiness": [] if SIDES[side].stock else ["input_batch"]}


def test_rows_are_medians_over_rounds_and_mark_what_may_be_noise() -> None:
    p10, p50 = host.rows([measured(0.5), measured(0.7)] * 3)
    assert p50[:5] == ["sync 1k, batch 8", "schedule p50", 100.0, 60.0, None]
    assert p50[5:] == [pytest.approx(0.6), None, 1.02]
    assert p10[1] == "schedule p10"
    assert host.rows([measured(0.99), measured(0.7)])[1][5] == [pytest.approx(0.845), "~"]
    assert host.rows([measured(1.01, noise=0.98)])[1][5] == [1.01, "~"]
    assert host.rows([measured(0.5)] * 4)[1][5] == [0.5, "?"]
    # Alike stock engines, and rounds that point either way.
    rounds = [measured(ratio, noise=1.0) for ratio in (0.7, 1.3) * 3]
    assert host.rows(rounds)[1][5] == [1.0, "~"]
    # The medians say slower, and the mean of the rounds faster.
    rounds = [measured(ratio, noise=1.0) for ratio in (0.2, 0.2, 1.001, 1.001, 1.001)]
    assert host.rows(rounds)[1][5] == [pytest.approx(1.001), "~"]
    assert host.rows([]) == []


def test_a_ratio_is_marked_where_the_rounds_point_the_other_way() -> None:
    found = Interval(0.9, 0.8, 0.99)
    assert marked(0.95, found) == 0.95
    assert marked(1.01, found) == [1.01, "~"]
    assert marked(1.0, found) == [1.0, "~"]
    assert marked(-0.1, Interval(2.0, 1.0, 3.0), equal=0.0) == [-0.1, "~"]


def test_cuda_calls_are_rows() -> None:
    counted = host.rows([measured(called=True), measured()])[2:]
    # One process counts; one round makes no claim.
    ratios = (None, [0.25, "?"], None, None)
    assert counted == [
        ["sync 1k, batch 8", f"CUDA calls in execute_model, {unit}", *values, *ratios]
        for unit, values in (("a step", (20.0, 5.0)), ("us", (60.0, 15.0)))
    ]


def test_what_is_proven_is_no_problem() -> None:
    assert host.problems({"round 1": measured()}) == []


def change_tokens(one: Any) -> None:
    one["cases"]["batch 8"]["tokens"]["overlaid"] = "other"


def change_tokens_of_v2(one: Any) -> None:
    one["cases"]["batch 8"]["tokens"]["mrv2"] = "other"


def run_ours_as_stock(one: Any) -> None:
    one["proof"]["stock"] = proof("overlaid")


def run_stock_as_ours(one: Any) -> None:
    one["proof"]["overlaid"] = proof("stock")


def run_v1_as_v2(one: Any) -> None:
    one["proof"]["mrv2"] = proof("stock")


def change_a_twin(one: Any) -> None:
    one["twins"][0]["state"] = "overlaid"


def schedule_asynchronously(one: Any) -> None:
    one["async"]["stock"] = True


def lack_v2(one: Any) -> None:
    one["failed"]["mrv2"] = "ValueError: no"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (change_tokens, "batch 8: stock and overlaid returned different tokens"),
        (change_tokens_of_v2, ""),
        (run_ours_as_stock, "stock's input_batch carries the overlay"),
        (run_ours_as_stock, "gpu_input_batch.py, which is overlaid"),
        (run_stock_as_ours, "overlaid's input_batch does not carry the overlay"),
        (run_v1_as_v2, "mrv2's runner is not of the pristine vllm/v1/worker/gpu/model_runner.py"),
        (change_a_twin, "vllm/v1/sample/metadata.py is overlaid, not stock's"),
        (schedule_asynchronously, "stock does not schedule as it should"),
        (lack_v2, "without mrv2: ValueError: no"),
    ],
)
def test_problems_are_told(spoil: Any, problem: str) -> None:
    one = measured()
    spoil(one)
    texts = host.problems({"round 1": one})
    assert any(problem in text for text in texts) if problem else texts == []


class Faked:
    """An engine that takes no time; it notes what it is told."""

    def __init__(self, name: str, load: Load, *_: object) -> None:
        if name == "mrv2":
            raise ValueError("no such runner")
        self.name, self.asynchronous, self.runner = name, False, None
        self.tokens: Mapping[str, list[int]] = {"0": [1, 2]}
        self.drafted = 0

    def begin(self, case: Case) -> None:
        pass

    def step(self) -> dict[str, int]:
        return dict.fromkeys(figures.PARTS, 1000)

    def end(self) -> None:
        pass

    def digest(self) -> str:
        return "same"

    def proof(self, stock: Path) -> dict[str, Any]:
        return {}


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
    assert list(engines) == ["stock", "overlaid", "stock again"]
    assert failed == {"mrv2": "ValueError: no such runner"}
