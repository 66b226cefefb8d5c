"""The benchmark of one step, run small on the real vLLM, stock and overlaid."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench import step, thinking
from bench.reports import figures
from bench.reports.markdown import markdown
from bench.reports.run_file import load
from support.sites import REPO
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.sampler import Sampler

SMALL = ["--batch", "2", "--vocab", "64", "--lengths", "8", "24", "--steps", "2", "--rounds", "1"]


def run_program(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bench.step", *SMALL, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO / "scripts")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_both_sides_are_measured_and_make_the_same_of_the_logits(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    done = run_program("--json", str(file), "--what", *step.FEATURES)
    assert done.returncode == 0, done.stderr
    run = load(file)
    assert done.stdout == markdown(run)
    assert [row[:3] for row in run["rows"]] == [
        [name, n, case]
        for name, feature in step.FEATURES.items()
        for n in (8, 24)
        for case in feature.cases
    ]
    assert all(row[5] == [row[3] / row[4], figures.FEW] for row in run["rows"])
    assert all(row[4] > 0 for row in run["rows"])
    assert run["problems"] == []
    assert run["machine"]["device"] == "CPU"
    # The command is the one to repeat, without where the results go.
    assert run["command"].startswith("PYTHONPATH=scripts python")
    assert " -m bench.step --batch 2 " in run["command"]
    assert str(file) not in run["command"]


def test_sides_that_differ_have_no_ratio() -> None:
    same = {"ms": 2.0, "logits": "a"}
    rows = step.table("penalties", [{"stock": {"8": same}, "overlaid": {"8": same}}])
    assert rows == ([["penalties", 8, "", 2.0, 2.0, [1.0, "?"]]], [])
    other = same | {"logits": "b"}
    rows = step.table("penalties", [{"stock": {"8": same}, "overlaid": {"8": other}}])
    assert rows[0] == [["penalties", 8, "", 2.0, 2.0, "refused"]]
    assert rows[1] == ["penalties, 8: the logits differ"]


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """A small benchmark on the CPU, where vLLM would pin memory all the same."""
    monkeypatch.setattr(async_tensor_h2d, "__defaults__", (False,))
    return Namespace(batch=8, vocab=512, device="cpu", steps=4)


def processed(args: Namespace, feature: str, case: str = "", near: bool = False) -> torch.Tensor:
    """[steps, batch, vocab] zeros after the processing of each step."""
    generator = torch.Generator().manual_seed(1)
    steps = step.Steps(Sampler(), args, feature, 32, case, generator, near)
    shape = (args.batch, args.vocab)
    logits = [steps.step(number, torch.zeros(shape)) for number in range(2 * args.steps)]
    assert steps.host > 0
    return torch.stack([*logits, steps.step(0, torch.zeros(shape))])


@pytest.mark.parametrize("case", step.FEATURES["thinking"].cases)
def test_a_budget_lasts_while_it_is_timed_and_ends_when_it_is_compared(
    args: Namespace, case: str
) -> None:
    assert not processed(args, "thinking", case).any()
    forced = processed(args, "thinking", case, near=True).nonzero()
    assert len(set(forced[:, 0].tolist())) == (0 if case == "no start" else 2 * args.steps + 1)
    assert set(forced[:, 2].tolist()) == (set() if case == "no start" else {*thinking.END})


def test_words_of_each_length_are_forbidden_in_the_step_that_is_compared(args: Namespace) -> None:
    forbidden = processed(args, "bad-words").isinf().sum(dim=2)
    assert forbidden[:-1].max() <= 4
    assert forbidden[-1].tolist() == [4] * args.batch


def test_penalties_change_the_logits_of_every_request(args: Namespace) -> None:
    changed: Any = processed(args, "penalties") != 0
    assert changed.any(dim=2).all()


def test_an_installation_that_is_not_there_is_named() -> None:
    done = run_program("--site", "/nowhere")
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr
