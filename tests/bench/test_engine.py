"""The benchmark of the engine: real engines, tiny, on the CPU."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench import engine
from bench.compare import manifest
from bench.compare.intervals import LEAST
from bench.reports import figures
from bench.reports.verify import edited
from support import forked, sites, spoilers
from support.asynchronous import announce
from support.benches import bench


def found(case: dict[str, Any], side: str = "overlaid") -> list[str]:
    """The problems of a side, but for clocks that a busy machine drives apart."""
    return [problem for problem in case["problems"][side] if "make up" not in problem]


def ratios(case: dict[str, Any]) -> set[float | None]:
    """All that compares the overlaid side with another or itself."""
    figures = case["figures"]
    compared = {ratio for figure in figures.values() for ratio in figure["ratios"].values()}
    return compared | {figure["overlaid"] for name, figure in figures.items() if " / " in name}


@pytest.mark.slow
def test_each_planted_fault_is_named_where_it_was_planted(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(
        *("engine", out, "--size", "tiny", "--rows", "issue-43450", "--rounds", "1"),
        site=sites.whole(tmp_path / "site"),
        paths=[
            announce(tmp_path / "plugins", forked.fork, spoilers.spoil),
            sites.REPO / "tests",
        ],
        environment=forked.ENVIRONMENT,
    )
    assert done.returncode == 1, done.stderr[-4000:]
    run = json.loads((out / "run.json").read_text())
    assert set(run["digests"]) == {"stock", "overlaid"}
    assert edited(run) == list(manifest.differences(run)) == []
    cases = run["rows"]["issue-43450"]["cases"]

    slow = cases["none"]
    assert found(slow) == found(slow, "stock") == []
    for name in ("sample_tokens p50", "step p50", "ITL p50"):
        longer = slow["figures"][name]["overlaid"] - slow["figures"][name]["stock"]
        assert longer > spoilers.SLOWER * 900, name
    assert slow["figures"]["tokens/s"]["overlaid"] < slow["figures"]["tokens/s"]["stock"]

    wrong = cases["mixed, no logprobs"]
    place = "request {}, position {}".format(*spoilers.WRONG)
    differ = "tokens of stock round 1 and overlaid round 1 differ"
    (problem,) = found(wrong)
    assert re.fullmatch(rf"{differ}: {place}: (\d+) against (?!\1$)\d+", problem)
    assert ratios(wrong) == {None}

    lost = cases["mixed, batch 2"]
    (counts,) = lost["counts"]["overlaid"]
    assert (counts["tokens"], counts["logprobs"]) == ([32, 32], [30, 32])
    assert "overlaid round 1: 30 of 32 logprobs" in found(lost)
    assert ratios(lost) == {None}

    for name in ("mixed, batch 8", "mixed, streamed", "mixed, no history"):
        assert found(cases[name]) == found(cases[name], "stock") == [], name
        (counts,) = cases[name]["counts"]["stock"]
        assert counts["tokens"] == counts["logprobs"] == [128, 128]
    table, page = ((out / name).read_text() for name in ("run.md", "run.html"))
    assert table in done.stdout
    for text in ("position 5", "30 of 32 logprobs", "refused"):
        assert text in table
        assert text in page


def test_rows_of_runner_v2_are_left_out_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    args = argparse.Namespace(rows=["pull-35214", "prime-rl-2772"], gpu=False, size="tiny")
    args.gpus = 0
    args.output = args.model = nothing
    args.sides, args.aa = ["overlaid"], False
    run = engine.EngineRun(args, nothing)
    assert list(run.tables) == ["prime-rl-2772"]
    assert run.tables["prime-rl-2772"].sides == ["stock", "overlaid"]
    assert "pull-35214 needs a GPU" in capsys.readouterr().err
    args.sides, args.aa = ["stock"], True
    assert engine.EngineRun(args, nothing).tables["prime-rl-2772"].sides == ["stock", "stock again"]


@pytest.mark.parametrize("gpus", [1, 2])
def test_rows_of_two_gpus_are_left_out_where_there_is_one(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = None
    args = argparse.Namespace(rows=["tensor-parallel", "prime-rl-2772"], gpu=True, size="full")
    args.output = args.model = nothing
    args.sides, args.aa, args.gpus = ["overlaid"], False, gpus
    run = engine.EngineRun(args, nothing)
    assert list(run.tables) == args.rows[2 - gpus :]
    assert ("tensor-parallel needs 2 GPUs" in capsys.readouterr().err) == (gpus == 1)


@pytest.mark.slow
def test_kept_engines_take_slices_by_turns(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bench(
        *("engine", out, "--size", "tiny", "--rows", "decode-half-b", "--rounds", "5", "--keep"),
        site=sites.whole(tmp_path / "site"),
    )
    run = json.loads((out / "run.json").read_text())
    assert run["complete"], done.stderr[-4000:]
    assert run["errors"] == []
    assert edited(run) == list(manifest.differences(run)) == []
    row = run["rows"]["decode-half-b"]
    for case in row["cases"].values():
        assert found(case) == found(case, "stock") == []
        for rounds in case["speeds"].values():
            assert [len(speeds) for speeds in rounds] == [row["output"] // 4] * 5
    text = (out / "run.md").read_text()
    for name, case in row["cases"].items():
        # Beside other tests a round is often disturbed, and then it makes no claim.
        clear = sum(not figures.disturbed(case, number, "overlaid") for number in range(5))
        line = re.search(rf"- {name}: overlaid [0-9.]+ \([0-9.]+ to [0-9.]+\)", text)
        assert bool(line) == (clear >= LEAST and not any(case["problems"].values()))
