"""The benchmark of one step, run small on the real vLLM, stock and overlaid."""

import json
from pathlib import Path

import pytest
import torch
from bench import sampling_step, thinking
from bench.sampling_step import FEATURES, Load, Steps
from support.benches import bench
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.sample.sampler import Sampler

LOAD = Load([*FEATURES], "cpu", batch=8, vocab=512, lengths=[32], steps=4)


@pytest.mark.slow
def test_both_sides_are_measured_and_make_the_same_of_the_logits(tmp_path: Path) -> None:
    sizes = ["--batch", "2", "--vocab", "64", "--lengths", "8", "24", "--steps", "2"]
    done = bench("step", tmp_path, "--rounds", "1", *sizes, "--what", *FEATURES)
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["complete"]
    assert list(run["rows"]) == list(FEATURES)
    for name, row in run["rows"].items():
        assert len(row["cases"]) == 2 * len(FEATURES[name])
        for case in row["cases"].values():
            assert case["problems"] == {"stock": [], "overlaid": []}
            (values,) = case["figures"].values()
            assert values["ratios"] == {"overlaid": values["overlaid"] / values["stock"]}
    assert run["machine"]["device"] == "CPU"
    assert " -m bench.step --site " in run["command"]


@pytest.fixture(autouse=True)
def unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU vLLM would pin memory all the same."""
    monkeypatch.setattr(async_tensor_h2d, "__defaults__", (False,))


def processed(feature: str, case: str = "", near: bool = False) -> torch.Tensor:
    """[steps, batch, vocab] zeros after the processing of each step."""
    generator = torch.Generator().manual_seed(1)
    steps = Steps(Sampler(), LOAD, feature, 32, case, generator, near)
    shape = (LOAD.batch, LOAD.vocab)
    logits = [steps.step(number, torch.zeros(shape)) for number in range(2 * LOAD.steps)]
    assert steps.host > 0
    return torch.stack([*logits, steps.step(0, torch.zeros(shape))])


@pytest.mark.parametrize("case", FEATURES["thinking"])
def test_a_budget_lasts_while_it_is_timed_and_ends_when_it_is_compared(case: str) -> None:
    assert not processed("thinking", case).any()
    forced = processed("thinking", case, near=True).nonzero()
    assert len(set(forced[:, 0].tolist())) == (0 if case == "no start" else 2 * LOAD.steps + 1)
    assert set(forced[:, 2].tolist()) == (set() if case == "no start" else {*thinking.END})


def test_penalties_change_the_logits_of_every_request() -> None:
    assert (processed("penalties") != 0).any(dim=2).all()


def test_logits_that_differ_in_one_step_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sampling_step.measure(LOAD)["results"]
    step = Steps.step

    def wrong(self: Steps, number: int, logits: torch.Tensor) -> torch.Tensor:
        result = step(self, number, logits)
        if number == 3:
            result[1, 7] += 1e-3
        return result

    monkeypatch.setattr(Steps, "step", wrong)
    other = sampling_step.measure(LOAD)["results"]
    case = "32 tokens, no start"
    assert one["thinking"][case]["logits"] != other["thinking"][case]["logits"]
    assert len(one["penalties"]["32 tokens"]["logits"]) == 1
