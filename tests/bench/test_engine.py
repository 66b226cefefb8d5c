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


@pytest.mark.slow
class TestSpoiltSide:
    """A run whose overlaid side is spoilt: each planted fault is where it was planted."""

    @pytest.fixture(scope="class")
    def out(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder with the results; stdout and stderr are in files beside them."""
        folder = tmp_path_factory.mktemp("bench")
        site = sites.whole(folder / "site")
        process = start(site, folder / "out", "--rows", "issue-43450", plugins=[spoilers.spoil])
        stdout, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1, stderr[-4000:]
        (folder / "out" / "stdout").write_text(stdout)
        (folder / "out" / "stderr").write_text(stderr)
        return folder / "out"

    @pytest.fixture(scope="class")
    def cases(self, out: Path) -> dict[str, Any]:
        run = json.loads((out / "run.json").read_text())
        assert set(run["digests"]) == {"stock", "overlaid"}
        cases: dict[str, Any] = run["rows"]["issue-43450"]["cases"]
        return cases

    @staticmethod
    def ratios(case: dict[str, Any]) -> set[float | None]:
        """All that compares the overlaid side with another or itself."""
        figures = case["figures"]
        ratios = {ratio for figure in figures.values() for ratio in figure["ratios"].values()}
        return ratios | {figure["overlaid"] for name, figure in figures.items() if " / " in name}

    def test_a_planted_slowdown_shows_where_it_is(self, cases: dict[str, Any]) -> None:
        assert cases["none"]["problems"] == {"stock": [], "overlaid": []}
        figures = cases["none"]["figures"]
        for figure in ("sample_tokens p50", "step p50", "ITL p50"):
            longer = figures[figure]["overlaid"] - figures[figure]["stock"]
            assert longer > spoilers.SLOWER * 900, figure
        assert figures["sample_tokens p50"]["ratios"]["overlaid"] > 2
        assert figures["tokens/s"]["ratios"]["overlaid"] < 1

    def test_a_planted_wrong_token_is_named_and_has_no_ratio(self, cases: dict[str, Any]) -> None:
        (problem,) = cases["mixed, no logprobs"]["problems"]["overlaid"]
        head = "tokens of stock round 1 and overlaid round 1 differ: "
        place = "request {}, position {}".format(*spoilers.WRONG)
        assert re.fullmatch(rf"{head}{place}: (\d+) against (?!\1$)\d+", problem)
        assert self.ratios(cases["mixed, no logprobs"]) == {None}

    def test_a_planted_lost_logprob_is_counted_and_has_no_ratio(
        self, cases: dict[str, Any]
    ) -> None:
        case = cases["mixed, batch 2"]
        (counts,) = case["counts"]["overlaid"]
        assert counts["tokens"] == [32, 32]
        assert counts["logprobs"] == [30, 32]
        assert "overlaid round 1: 30 of 32 logprobs" in case["problems"]["overlaid"]
        assert self.ratios(case) == {None}

    def test_the_other_cases_are_identical_and_whole(self, cases: dict[str, Any]) -> None:
        for name in ("mixed, batch 8", "mixed, streamed", "mixed, no history"):
            assert cases[name]["problems"] == {"stock": [], "overlaid": []}, name
            assert len(self.ratios(cases[name])) > 10
            (counts,) = cases[name]["counts"]["stock"]
            assert counts["tokens"] == counts["logprobs"] == [128, 128]
        figures = cases["mixed, batch 8"]["figures"]
        parts = figures["execute_model p50"]["stock"] + figures["sample_tokens p50"]["stock"]
        assert 0 < parts < figures["step p50"]["stock"]
        # The worker's step is the client's time between outputs.
        assert figures["step p50"]["stock"] == pytest.approx(figures["ITL p50"]["stock"], rel=0.1)

    def test_the_report_names_the_faults(self, out: Path) -> None:
        table = (out / "run.md").read_text()
        assert table in (out / "stdout").read_text()
        for text in ("position 5", "30 of 32 logprobs", "refused"):
            assert text in table
            assert text in (out / "run.html").read_text()
        assert "16/16" in (out / "stderr").read_text()


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
