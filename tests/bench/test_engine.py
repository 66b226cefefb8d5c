"""The benchmark of the engine: real engines, tiny, on the CPU."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench import sides
from support import forked, sites, spoilers
from support.asynchronous import announce

PROGRAM = sites.REPO / "scripts" / "bench" / "engine.py"
PATIENCE = 400.0


def start(
    site: Path, out: Path, *more: str, plugins: Sequence[Callable[[], None]] = ()
) -> subprocess.Popen[str]:
    command = [sys.executable, str(PROGRAM), "--site", str(site), "--python", sys.executable]
    command += ["--size", "tiny", "--rounds", "1", "--out", str(out), *more]
    announced = announce(out.with_name("plugins"), forked.fork, *plugins)
    path = os.pathsep.join(map(str, (announced, sites.REPO / "tests")))
    env = {**os.environ, **forked.ENVIRONMENT, "PYTHONPATH": path}
    # A bar in a pipe is one line; its numbers are looked at below.
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file's size and time of change."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str, bool]:
    """A run whose overlaid side is spoilt: the run, its folder, what it said, what it left."""
    folder = tmp_path_factory.mktemp("bench")
    site = sites.whole(folder / "site")
    before = contents(site)
    process = start(site, folder / "out", "--rows", "issue-43450", plugins=[spoilers.spoil])
    said, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, progress[-4000:]
    whole = json.loads((folder / "out" / "run.json").read_text())
    return whole, folder / "out", said + progress, contents(site) == before


def of(spoilt: tuple[dict[str, Any], Path, str, bool], case: str) -> dict[str, Any]:
    found: dict[str, Any] = spoilt[0]["rows"]["issue-43450"]["cases"][case]
    return found


def ratios(case: dict[str, Any]) -> set[float | None]:
    """Everything in a case that holds the overlaid side against another or itself."""
    figures = case["figures"]
    found = {ratio for figure in figures.values() for ratio in figure["ratios"].values()}
    return found | {figure["overlaid"] for name, figure in figures.items() if " / " in name}


def test_a_planted_slowdown_shows_where_it_is(spoilt: Any) -> None:
    case = of(spoilt, "none")
    assert case["problems"] == {"stock": [], "overlaid": []}
    figures = case["figures"]
    for figure in ("sample_tokens p50", "step p50", "ITL p50"):
        longer = figures[figure]["overlaid"] - figures[figure]["stock"]
        assert longer > spoilers.SLOWER * 900, figure
    assert figures["sample_tokens p50"]["ratios"]["overlaid"] > 2
    assert figures["tokens/s"]["ratios"]["overlaid"] < 1


def test_a_planted_wrong_token_is_named_and_has_no_ratio(spoilt: Any) -> None:
    case = of(spoilt, "mixed, no logprobs")
    request, position = spoilers.WRONG
    (problem,) = case["problems"]["overlaid"]
    head = "tokens of stock round 1 and overlaid round 1 differ: "
    assert re.fullmatch(
        rf"{head}request {request}, position {position}: (\d+) against (?!\1$)\d+", problem
    )
    assert ratios(case) == {None}


def test_a_planted_lost_logprob_is_counted_and_has_no_ratio(spoilt: Any) -> None:
    case = of(spoilt, "mixed, batch 2")
    (counts,) = case["counts"]["overlaid"]
    assert counts["tokens"] == [32, 32]
    assert counts["logprobs"] == [30, 32]
    assert "overlaid round 1: 30 of 32 logprobs" in case["problems"]["overlaid"]
    assert ratios(case) == {None}


def test_what_is_not_spoilt_is_identical_and_whole(spoilt: Any) -> None:
    for name in ("mixed, batch 8", "mixed, streamed", "mixed, no history"):
        case = of(spoilt, name)
        assert case["problems"] == {"stock": [], "overlaid": []}, name
        assert case["figures"]["tokens/s"]["ratios"]["overlaid"] > 0
        assert len(ratios(case)) > 10
        (counts,) = case["counts"]["stock"]
        assert counts["tokens"] == counts["logprobs"] == [128, 128]


def test_every_figure_of_a_step_was_seen(spoilt: Any) -> None:
    figures = of(spoilt, "mixed, batch 8")["figures"]
    for name in ("step p50", "execute_model p50", "sample_tokens p99", "ITL p99"):
        for side in ("stock", "overlaid"):
            assert figures[name][side] > 0, name
    parts = figures["execute_model p50"]["stock"] + figures["sample_tokens p50"]["stock"]
    assert parts < figures["step p50"]["stock"]
    # The worker's step is the client's time between outputs.
    assert figures["step p50"]["stock"] == pytest.approx(figures["ITL p50"]["stock"], rel=0.1)


def test_the_report_names_the_faults_for_people(spoilt: Any) -> None:
    _, out, said, _ = spoilt
    table = (out / "run.md").read_text()
    assert table in said
    for text in ("position 5", "30 of 32 logprobs", "refused"):
        assert text in table
        assert text in (out / "run.html").read_text()


def test_the_installation_is_left_as_it_was(spoilt: Any) -> None:
    whole, _, _, untouched = spoilt
    assert untouched
    assert set(whole["digests"]) == {"stock", "overlaid"}


def test_it_tells_how_far_it_is_and_what_is_left(spoilt: Any) -> None:
    said = spoilt[2]
    assert re.search(r"small, (stock|overlaid), round 1: +\d+%.*/16 \[\d\d:\d\d<\d\d:\d\d", said)
    assert "16/16" in said


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    site = sites.whole(tmp_path / "site")
    out = tmp_path / "out"
    process = start(site, out, "--rows", "prime-rl-2772")
    deadline = time.monotonic() + PATIENCE
    while not (out / "run.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    said, progress = process.communicate(timeout=60)
    assert process.returncode == 130, progress[-2000:]
    assert "what was measured is kept" in progress
    whole = json.loads((out / "run.json").read_text())
    assert whole["complete"] is False
    case = whole["rows"]["prime-rl-2772"]["cases"]["presence 1.5"]
    assert case["figures"]["tokens/s"]["stock"] > 0
    assert case["figures"]["tokens/s"]["overlaid"] is None
    assert "overlaid was not measured" in case["problems"]["overlaid"]
    assert "overlaid was not measured" in said
    assert (out / "run.html").is_file()
    assert not list(tmp_path.glob("bench-*")), "the views are gone"


def test_an_overlaid_installation_is_measured_against_its_pristine_self(tmp_path: Path) -> None:
    site = sites.whole(tmp_path / "site")
    overlay = [sys.executable, str(sites.REPO / "scripts" / "overlay"), "apply", "--force"]
    subprocess.run([*overlay, "--site", str(site), "--python", sys.executable], check=True)
    before = contents(site)
    found = sides.Sides(site, tmp_path / "work", sys.executable)
    pristine = sides.Sides(sites.whole(tmp_path / "pristine"), tmp_path / "other", sys.executable)
    assert found.digests == pristine.digests
    assert contents(site) == before


def test_rows_of_runner_v2_are_left_out_without_a_gpu(tmp_path: Path) -> None:
    process = start(sites.whole(tmp_path / "site"), tmp_path / "out", "--rows", "pull-35214")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pull-35214 needs a GPU" in error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rounds", "0"], "--rounds is at least 1"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["--sides", "mrv2"], "Model Runner V2 needs a GPU"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    site = sites.small(tmp_path / "site")
    process = start(site, tmp_path / "out", "--device", "cpu", *arguments)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sentence in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_the_active_environment_is_measured_if_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    sites.small(tmp_path / "venv" / "lib" / "python3.12" / "site-packages")
    env = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    command = [sys.executable, str(PROGRAM), "--out", str(tmp_path / "out"), "--rounds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert "--rounds is at least 1" in done.stderr


def test_results_cannot_go_into_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    _, error = start(sites.small(tmp_path / "site"), tmp_path / "out").communicate(timeout=60)
    assert "is a file; name a directory" in error
    assert (tmp_path / "out").read_text() == "mine"


def test_ctrl_c_before_anything_was_measured_leaves_nothing(tmp_path: Path) -> None:
    process = start(sites.whole(tmp_path / "site"), tmp_path / "out", "--rows", "prime-rl-2772")
    deadline = time.monotonic() + PATIENCE
    while not (views := list(tmp_path.glob("bench-*/pristine/vllm"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.strip().endswith("stopped; run.json has what was measured")
    assert "Traceback" not in error
    assert views
    assert not list(tmp_path.glob("bench-*"))


def plain(folder: Path) -> Path:
    (folder / "site").mkdir()
    return folder / "site"


def foreign(folder: Path) -> Path:
    site = sites.whole(folder / "site")
    file = site / "vllm" / "v1" / "sample" / "sampler.py"
    text = file.read_text()
    file.unlink()  # it is a link to everybody's
    file.write_text(f"{text}# changed\n")
    return site


@pytest.mark.parametrize(("make", "sentence"), [(plain, "no vLLM"), (foreign, "sampler.py")])
def test_what_cannot_be_compared_is_refused(
    make: Callable[[Path], Path], sentence: str, tmp_path: Path
) -> None:
    process = start(make(tmp_path), tmp_path / "out", "--rows", "prime-rl-2772")
    _, error = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert sentence in error
    assert "Traceback" not in error
    shutil.rmtree(tmp_path, ignore_errors=True)
