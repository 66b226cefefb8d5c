"""The benchmark of steady batches: its requests, its counts, and a real run with planted faults."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import engine, thinking
from bench.engine import EngineRun
from bench.harness import manifest
from bench.loops import steady
from bench.loops.rows import ROWS, SHAPES, Source
from bench.results.run_file import load
from bench.results.slices import compare, grouped
from support import forked, sites, spoilers
from support.asynchronous import announce
from support.benches import bench

SIDES = ("overlaid", "stock")


@pytest.mark.slow
def test_each_planted_fault_is_named_where_it_was_planted(tmp_path: Path) -> None:
    rows, output = ("plain", "presence", "logprobs", "mixed", "thinking"), 16
    done = bench(
        *("engine", tmp_path / "out", "--shapes", "tiny-4", "--rows", *rows, "--rounds", "1"),
        *("--output", str(output), "--pairs", "/".join(SIDES)),
        site=sites.whole(tmp_path / "site"),
        paths=[
            announce(tmp_path / "plugins", forked.fork, spoilers.spoil),
            sites.REPO / "tests",
        ],
        environment=forked.ENVIRONMENT,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    run = load(tmp_path / "out" / "run.json")
    assert run["complete"]
    assert run["problems"] == list(manifest.differences(run)) == []
    groups = {case: of for (_, case, _), of in grouped(run["slices"]).items()}
    assert list(groups) == [f"{row}, 4" for row in rows]
    for name in ("plain, 4", "mixed, 4", "thinking, 4"):
        assert [one["problems"] for one in groups[name]] == [[], []], name
        for one in groups[name]:
            assert one["digests"]["overlaid"] == one["digests"]["stock"]

    for one in groups["plain, 4"]:
        slower, stock = (one["figures"][side] for side in SIDES)
        assert slower["ITL p50"] - stock["ITL p50"] > spoilers.SLOWER * 900
        assert slower["tokens/s"] < stock["tokens/s"]
    assert compare(groups["plain, 4"], "tokens/s").ratio is not None

    place = "request {}, position {}".format(*spoilers.WRONG)
    for one in groups["presence, 4"]:
        (text,) = one["problems"]
        differ = f"tokens of overlaid and stock differ: {place}"
        assert re.fullmatch(rf"{differ}: (\d+) against (?!\1$)\d+", text)

    for one in groups["logprobs, 4"]:
        lost, differ = one["problems"]
        expected = 4 * output
        assert lost == f"overlaid: {expected - 4} of {expected} positions with all logprobs"
        assert differ.startswith("logprobs of overlaid and stock differ: request 0, position 7")
    for name in ("presence, 4", "logprobs, 4"):
        assert compare(groups[name], "tokens/s").ratio is None
    text = (tmp_path / "out" / "run.md").read_text()
    for part in (place, "positions with all logprobs", "| refused |"):
        assert part in text


@pytest.mark.parametrize("row", ROWS)
def test_requests_of_a_steady_batch_are_equally_long_and_new_in_each_slice(row: str) -> None:
    def batch(seed: int) -> list[Any]:
        source = Source(SHAPES["tiny-4"], row, seed, output=20)
        return [source.steady(place) for place in range(4)]

    first = batch(2)
    assert [one.sampling.max_tokens for one in first] == [20] * 4
    prompts = [tuple(one.prompt["prompt_token_ids"]) for one in first]
    assert {*map(len, prompts)} == {12}
    assert [repr(one) for one in first] == [repr(one) for one in batch(2)]
    # A side that remembers what it has computed gains nothing.
    others = [tuple(one.prompt["prompt_token_ids"]) for one in batch(3)]
    warmups = Source(SHAPES["tiny-4"], row, 2, output=20)
    others += [tuple(warmups.warmup(place).prompt["prompt_token_ids"]) for place in range(4)]
    assert len({*prompts, *others}) == 12


def test_tokens_are_those_of_the_model() -> None:
    source = Source(SHAPES["tiny-4"], "bad-words", 1, output=20, vocabulary=30)
    for place in range(4):
        one = source.steady(place)
        assert max(one.prompt["prompt_token_ids"]) < 30
        assert max(max(word) for word in one.sampling._bad_words_token_ids or ()) < 30


def asked(**parameters: Any) -> Any:
    usual = {"max_tokens": 3, "logprobs": None, "thinking_token_budget": None}
    return SimpleNamespace(sampling=SimpleNamespace(**{**usual, **parameters}))


ENDED, ENDLESS = [1, *thinking.END], [*thinking.END[:-1], 3, 4]


@pytest.mark.parametrize(
    ("requests", "tokens", "logprobs", "counts"),
    [
        ([asked()], [[1, 2, 3]], [[]], {"tokens": (3, 3), "positions with all logprobs": (0, 0)}),
        ([asked()], [[1, 2]], [[]], {"tokens": (2, 3), "positions with all logprobs": (0, 0)}),
        (
            [asked(logprobs=2), asked()],
            [[1, 2, 3], [1, 2, 3]],
            [["1:1:-0.5 2:2:-0.6", "1:1:-0.5 2:2:-0.6 5:9:-3.0", "1:1:-0.5"], []],
            {"tokens": (6, 6), "positions with all logprobs": (2, 3)},
        ),
        (
            [asked(thinking_token_budget=1), asked(thinking_token_budget=1)],
            [ENDED, ENDLESS],
            [[], []],
            {
                **{"tokens": (6, 6), "positions with all logprobs": (0, 0)},
                "requests that used up their budget": (1, 2),
            },
        ),
        (
            [asked(thinking_token_budget=2)],
            [ENDLESS],
            [[]],
            {
                **{"tokens": (3, 3), "positions with all logprobs": (0, 0)},
                "requests that used up their budget": (0, 0),
            },
        ),
    ],
)
def test_outputs_are_counted(requests: Any, tokens: Any, logprobs: Any, counts: Any) -> None:
    assert steady.counts(requests, tokens, logprobs) == counts


def test_the_engine_takes_the_markers_without_a_tokenizer() -> None:
    config = thinking.config()
    model: Any = None
    config.initialize_token_ids(model)
    assert config.enabled
    assert config.reasoning_start_token_ids == thinking.START
    assert config.reasoning_end_token_ids == thinking.END


def test_a_run_compares_outputs_without_the_fixes(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    installations: Any = SimpleNamespace(work=tmp_path)
    args = argparse.Namespace(
        **{"pairs": ["overlaid/stock"], "shapes": ["tiny-4"], "rows": ["plain"]},
        **{"graphs": None, "gpus": [], "output": 64, "model": tmp_path / "mine", "ranks": 2},
    )
    run = EngineRun(args, installations)
    assert run.environment["VLLM_READINESS"] == "-fixes"
    assert run.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert run.title == "Steady batches, 64 tokens for each request. Model: mine."
    (start,) = run.starts()
    settings = {key: start.settings[key] for key in ("kind", "output", "model", "gpus")}
    assert settings == {
        **{"kind": "steady", "output": 64, "model": str(tmp_path / "mine"), "gpus": 2},
    }


def test_ranks_need_their_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--site", str(sites.UPSTREAM), "--out", str(tmp_path), "--ranks", "99"])
    assert "--ranks 99 --places" in capsys.readouterr().err
