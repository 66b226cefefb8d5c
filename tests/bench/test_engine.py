"""The benchmark of the engine: real engines, tiny, on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import forked, sites, spoilers
from support.asynchronous import announce

#: Seconds for one run.
PATIENCE = 900.0


def start(
    site: Path, out: Path, *more: str, plugins: Sequence[Callable[[], None]] = ()
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.engine", "--site", str(site), "--size", "tiny"]
    command += ["--python", sys.executable, "--rounds", "1", "--out", str(out), *more]
    announced = announce(out.with_name("plugins"), forked.fork, *plugins)
    path = [announced, sites.REPO / "tests", sites.REPO / "scripts"]
    env = {**os.environ, **forked.ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, path))}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


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
    site = sites.whole(tmp_path / "site")
    process = start(site, out, "--rows", "issue-43450", plugins=[spoilers.spoil])
    stdout, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, stderr[-4000:]
    run = json.loads((out / "run.json").read_text())
    assert set(run["digests"]) == {"stock", "overlaid"}
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
    assert table in stdout
    for text in ("position 5", "30 of 32 logprobs", "refused"):
        assert text in table
        assert text in page
    assert "16/16" in stderr


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(sites.whole(tmp_path / "site"), out, "--rows", "prime-rl-2772")
    wait_for(process, (out / "run.json").exists)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr[-2000:]
    assert "what was measured is kept" in stderr
    run = json.loads((out / "run.json").read_text())
    assert run["complete"] is False
    case = run["rows"]["prime-rl-2772"]["cases"]["presence 1.5"]
    assert case["figures"]["tokens/s"]["stock"] > 0
    assert case["figures"]["tokens/s"]["overlaid"] is None
    assert "overlaid was not measured" in case["problems"]["overlaid"]
    assert "overlaid was not measured" in stdout
    assert (out / "run.html").is_file()
    assert not list(tmp_path.glob("bench-*")), "the views are gone"


def wait_for(process: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ctrl_c_before_anything_was_measured_leaves_nothing(tmp_path: Path) -> None:
    process = start(sites.whole(tmp_path / "site"), tmp_path / "out", "--rows", "prime-rl-2772")
    wait_for(process, lambda: list(tmp_path.glob("bench-*/pristine/vllm")))
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.strip().endswith("stopped; run.json has what was measured")
    assert "Traceback" not in stderr
    assert not list(tmp_path.glob("bench-*"))


def test_rows_of_runner_v2_are_left_out_without_a_gpu(tmp_path: Path) -> None:
    process = start(sites.whole(tmp_path / "site"), tmp_path / "out", "--rows", "pull-35214")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pull-35214 needs a GPU" in stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "'0' is not a number of rounds"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["--sides", "mrv2"], "Model Runner V2 needs a GPU"),
    ],
)
def test_a_run_that_cannot_be_made_is_refused_at_once(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    site = sites.small(tmp_path / "site")
    process = start(site, tmp_path / "out", "--device", "cpu", *arguments)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_an_installation_that_somebody_changed_is_refused(tmp_path: Path) -> None:
    site = sites.whole(tmp_path / "site")
    file = site / "vllm" / "v1" / "sample" / "sampler.py"
    text = file.read_text()
    file.unlink()  # a link that other tests share
    file.write_text(f"{text}# changed\n")
    _, stderr = start(site, tmp_path / "out", "--rows", "prime-rl-2772").communicate(timeout=60)
    assert "sampler.py" in stderr
    assert "Traceback" not in stderr
