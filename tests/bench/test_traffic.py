"""The benchmark of closed-loop traffic: its requests, kinds of step, pairs, and real runs."""

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import traffic
from bench.harness.pairs import Start
from bench.loops.arguments import arguments
from bench.loops.rows import ENGINES, MARKERS, ROWS, SHAPES, Request, request
from bench.loops.timed import CHANGED, MIXED, SAME, Clock
from bench.models import DENSE
from bench.run import Run
from support.benches import measured
from support.slow_fixes import SLOWER, slow
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

SIDES = ("overlaid", "overlaid=-fixes")


def measure(program: str, out: Path, *arguments: str) -> Run:
    """A run of the smallest engine, in which steps are slower where the fixes are on."""
    sizes = ("--shapes", "tiny-4", "--rounds", "1", "--pairs", "/".join(SIDES))
    return measured(program, out, *sizes, *arguments, plugins=(slow,))


@pytest.mark.slow
def test_a_planted_cost_is_found_in_its_part_of_every_kind_of_step(tmp_path: Path) -> None:
    arguments = ("--rows", "plain", "--places", "1", "--seconds", "3")
    run = measure("parts", tmp_path / "out", *arguments)
    parts = ("execute_model", "_prepare_inputs", "sample_tokens", "schedule", "update_from_output")
    assert (len(run.slices), run.load) == (2, "steps")
    for one in run.slices:
        slower, faster = one.figures
        for part, kind in itertools.product(parts, (SAME, MIXED)):
            name, planted = f"{part} p50, {kind}", part == "sample_tokens"
            assert faster[name] > 0
            assert (slower[name] > SLOWER * 1e3) == planted, name


@pytest.mark.slow
def test_sides_that_run_at_the_same_time_exchange_places(tmp_path: Path) -> None:
    rows = ("plain", "grammars", "bad-words")
    arguments = ("--rows", *rows, "--places", "2", "--seconds", "1")
    run = measure("traffic", tmp_path / "out", *arguments)
    cases = [f"{row}, 4" for row in rows]
    assert [(one.case, one.order) for one in run.slices] == [*itertools.product(cases, (0, 1))]
    for one in run.slices:
        slower, faster = one.figures
        # Medians: one stall of a busy machine can take most of a slice's second. A client that got
        # no time reads tokens of two steps at once, so that they may be below SLOWER.
        assert slower["ITL p50"] > faster["ITL p50"]
        assert 0 < slower["tokens/s"] < 4 / SLOWER
        assert faster["tokens/s"] > 0
        for figures in (slower, faster):
            assert figures["TTFT p99"] >= figures["TTFT p50"] > 0
            assert figures["ITL p99"] >= figures["ITL p50"]
            assert 0 < figures["engine core's cores"] <= len(os.sched_getaffinity(0)) + 0.5


def test_parts_count_for_their_own_step_though_another_was_scheduled_since() -> None:
    """As under asynchronous scheduling: an output is processed after the next step began."""
    outputs = iter(
        SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), scheduled_new_reqs=new)
        for names, new in [("ab", "ab"), ("ab", ""), ("b", ""), ("", "")]
    )
    scheduler, runner = parties()
    scheduler.schedule = lambda: next(outputs)
    runner.execute_model = lambda _: runner._prepare_inputs()
    times = Clock(scheduler, runner, 1).times
    first, second, third = (scheduler.schedule() for _ in range(3))
    runner.execute_model(first)
    runner.execute_model(second)
    runner.sample_tokens()
    scheduler.update_from_output(first, None)
    runner.execute_model(third)
    scheduler.update_from_output(third, None)
    scheduler.schedule()
    assert all(len(spent) == 1 for spent in times.values())
    executed = {"schedule", "execute_model", "_prepare_inputs"}
    assert times.keys() == {
        *((kind, part) for kind in (SAME, CHANGED, MIXED) for part in executed),
        *((kind, "update_from_output") for kind in (MIXED, CHANGED)),
        (SAME, "sample_tokens"),
        (None, "schedule"),
    }


def parties() -> tuple[Any, Any]:
    """A scheduler and a runner that do nothing."""
    names = ("_update_states", "_prepare_inputs", "_build_attention_metadata", "_model_forward")
    runner: Any = SimpleNamespace(**{name: lambda: None for name in names})
    runner.model = SimpleNamespace(compute_logits=lambda: None)
    runner.execute_model, runner.sample_tokens = lambda _: None, lambda: None
    return SimpleNamespace(schedule=None, update_from_output=lambda *_: None), runner


def step(requests: str, new: str = "", prompt: str = "") -> Any:
    tokens = {name: 7 if name == prompt else 1 for name in requests}
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_new_reqs=[*new])


def test_kinds_of_step() -> None:
    taken = [
        *((step("ab", new="ab"), MIXED), (step("ab"), SAME), (step("b"), CHANGED)),
        *((step("b"), SAME), (step("bc", new="c"), MIXED), (step("bc", prompt="c"), MIXED)),
        *((step("cb"), SAME), (step("cd"), CHANGED), (step(""), None), (step("bc"), CHANGED)),
    ]
    scheduler, runner = parties()
    scheduler.schedule = lambda: None
    clock = Clock(scheduler, runner, 1)
    assert [clock.kind(output) for output, _ in taken] == [kind for _, kind in taken]


def test_the_model_s_own_work_is_not_the_host_s() -> None:
    scheduler, runner = parties()
    scheduler.schedule = lambda: step("a", new="a")
    runner._model_forward = lambda: time.sleep(0.02)
    runner.execute_model = lambda _: runner._model_forward()
    times = Clock(scheduler, runner, 1).times
    runner.execute_model(scheduler.schedule())
    assert times[MIXED, "execute_model"][0] < 10e6
    assert times[MIXED, "model"][0] > 20e6


def requests(row: str, count: int = 3, seed: int = 1, shape: str = "tiny-4") -> list[list[Request]]:
    """The first requests of each place, places first."""
    places = range(SHAPES[shape].concurrency)
    return [[request((shape, row), seed, place, n) for n in range(count)] for place in places]


def shown(sent: Sequence[Sequence[Request]]) -> list[Any]:
    return [[(one.name, one.prompt, repr(one.sampling)) for one in of] for of in sent]


@pytest.mark.parametrize("row", ROWS)
def test_requests_are_drawn_by_seed_place_and_number(row: str) -> None:
    assert shown(requests(row)) == shown(requests(row)) != shown(requests(row, seed=2))
    prompts = [one.prompt["prompt_token_ids"] for of in requests(row) for one in of]
    assert len({*map(tuple, prompts)}) == len(prompts)


def test_lengths_have_their_means_and_first_requests_are_cut() -> None:
    sent = requests("plain", 30, shape="half-b-128")
    prompts = [len(one.prompt["prompt_token_ids"]) for of in sent for one in of]
    assert statistics.fmean(prompts) == pytest.approx(100, rel=0.05)
    assert statistics.stdev(prompts) > 50
    first = statistics.fmean(of[0].sampling.max_tokens or 0 for of in sent)
    later = statistics.fmean(one.sampling.max_tokens or 0 for of in sent for one in of[1:])
    assert later == pytest.approx(200, rel=0.05)
    assert first == pytest.approx(100, rel=0.25)
    short = requests("plain", 200)  # whose lengths have a limit
    assert max(len(one.prompt["prompt_token_ids"]) for of in short for one in of) <= 64


def test_rows_ask_for_what_they_are_named_after() -> None:
    def asking(row: str, name: str, shape: str = "half-b-128") -> int:
        plain = SamplingParams()
        sent = requests(row, 1, shape=shape)
        return sum(getattr(one.sampling, name) != getattr(plain, name) for (one,) in sent)

    assert asking("presence", "presence_penalty") == 128
    assert asking("one-presence", "presence_penalty") == 1
    assert asking("grammars", "structured_outputs") == 13
    assert asking("seeded", "seed") == asking("logprobs", "logprobs") == 128
    assert asking("bad-words", "bad_words") == 128
    assert asking("greedy", "temperature") == 128
    assert all(asking("mixed", name) for name in ("logprobs", "top_p", "top_k", "seed", "min_p"))
    for (one,) in requests("thinking", 1):
        assert " ".join(f"t{n}" for n in one.prompt["prompt_token_ids"][-2:]) == MARKERS[0]
        assert 0 < (one.sampling.thinking_token_budget or 0) <= (one.sampling.max_tokens or 0)
    seeds = {one.sampling.seed for of in requests("seeded") for one in of}
    assert len(seeds) == 12


def starts(spec: dict[str, Any], *shapes: str, **named: Any) -> list[Start]:
    """The starts of a round on a GPU, against stock and Model Runner V2, with these arguments."""
    pairs = [("overlaid", "stock"), ("overlaid", "mrv2")]
    usual = {"pairs": pairs, "rows": None, "graphs": None, "drafts": "none", "gpus": ["0"]}
    args = argparse.Namespace(**{**usual, "shapes": shapes, **named})
    return list(traffic.starts(args, spec))


def test_model_runner_v2_is_given_what_it_supports() -> None:
    shapes = ("half-b-128", "half-b-32", "hybrid-64")
    made = starts({"kind": "served"}, *shapes, graphs=["piecewise"])
    assert [f"{start.engine}, {start.sides[1]}" for start in made] == [
        "0.5B, piecewise, stock",
        "0.5B, piecewise, thinking budget configured, stock",
        "hybrid, piecewise, stock",
        "hybrid, piecewise, thinking budget configured, stock",
        "0.5B, piecewise, mrv2",
    ]
    start = made[-1]
    cases = start.cases
    assert cases["plain, 32"] == ("half-b-32", "plain")
    settings = {"kind": "served", "engine": "half-b", "graphs": "piecewise", "thinking": False}
    assert start.spec == settings
    assert {shape for shape, _ in cases.values()} == {"half-b-128", "half-b-32"}
    assert len(cases) == 2 * len([row for row in ROWS.values() if not row.thinking])
    assert ENGINES["hybrid"].rows == ["plain", "thinking-presence"]


@pytest.mark.parametrize(
    ("drafts", "others"),
    [("ngram", ["stock"]), ("ngram_gpu", ["stock"]), ("eagle", ["stock", "mrv2"])],
)
def test_with_drafts_only_what_vllm_serves_is_measured(
    drafts: str, others: list[str], tmp_path: Path
) -> None:
    spec = {"models": str(tmp_path), "drafts": drafts, "memory": 0.4}
    made = starts(spec, "half-b-32", rows=["greedy", "mixed"], graphs=["none"], drafts=drafts)
    assert [start.sides[1] for start in made] == others
    for start in made:
        assert start.engine == f"0.5B, none, {drafts} drafts"
        assert [*start.cases] == ["greedy, 32"]
        config = arguments(start.spec)["speculative_config"]
        assert config["method"] == drafts
        assert config.get("model") == (
            str(tmp_path / "half-b" / "eagle") if drafts == "eagle" else None
        )


@pytest.mark.parametrize(
    ("gpus", "abouts"),
    [(["0"], ["0.5B, piecewise", "0.5B, full", "hybrid, piecewise"]), ([], ["0.5B, none"])],
)
def test_graphs_are_those_of_the_engine_unless_they_are_named(
    gpus: list[str], abouts: list[str]
) -> None:
    made = starts({}, "half-b-128", "hybrid-64", rows=["plain"], gpus=gpus)
    found = [start.engine for start in made]
    assert found[: len(abouts)] == abouts


def test_processes_of_vllms_load_the_model_without_experts() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="bench")
    plugin.load()()
    assert issubclass(ModelRegistry.models[DENSE].load_model_cls(), Qwen3NextForCausalLM)
    assert ENGINES["next"].model["architectures"] == [DENSE]
