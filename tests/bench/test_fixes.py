"""The benchmark of what the fixes cost the host."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import fixes
from bench.host_work import PARTS, TOGETHER, Clock
from support.asynchronous import announce
from support.benches import bench
from support.sites import REPO
from support.slow_fixes import SLOWER, slow
from vllm.v1.readiness import registry


@pytest.mark.slow
def test_a_planted_cost_is_found_in_its_part_alone(tmp_path: Path) -> None:
    paths = [announce(tmp_path / "plugins", slow), REPO / "tests"]
    sizes = ["--rounds", "1", "--batch", "4", "--steps", "12"]
    done = bench("fixes", tmp_path / "out", *sizes, paths=paths)
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    (measured,) = run["rounds"]
    on = sorted(registry.FIXES)
    assert measured["fixes"] == {"on": on, "on again": on, "off": []}
    costs = {part: figures["cost"] for part, figures in measured["parts"].items()}
    assert list(costs) == [*PARTS, TOGETHER]
    slower = {part for part, cost in costs.items() if cost > SLOWER / 2 * 1e6}
    assert slower == {"sample_tokens", TOGETHER}
    assert all(abs(of["noise"]) < SLOWER / 2 * 1e6 for of in measured["parts"].values())
    for of in measured["parts"].values():
        assert min(of["on"], of["on again"], of["off"]) > 0
    assert run["complete"]
    assert run["problems"] == []
    assert [row[0] for row in run["rows"]] == [*PARTS, TOGETHER]


def test_a_clock_leaves_out_what_is_excluded_within_a_part() -> None:
    def outer() -> str:
        time.sleep(0.002)
        return str(runner.inner())

    def inner() -> str:
        time.sleep(0.05)
        return "done"

    def fail() -> None:
        raise ValueError

    runner: Any = SimpleNamespace(outer=outer, inner=inner, fail=fail)
    clock = Clock()
    clock.time(runner, "outer")
    clock.time(runner, "fail")
    clock.exclude(runner, "inner")
    assert (runner.outer(), runner.inner(), runner.outer()) == ("done",) * 3
    with pytest.raises(ValueError):
        runner.fail()
    lap = clock.lap()
    assert lap.keys() == {"outer", "fail"}
    assert 4e6 <= lap["outer"] < 90e6
    assert clock.lap() == {}


def measured(cost: float, noise: float, tokens: str = "same", off: list[str] | None = None) -> Any:
    """One round of one part."""
    figures = {"on": 20.0 + cost, "on again": 20.0, "off": 20.0, "cost": cost, "noise": noise}
    return {
        "parts": {"schedule": figures},
        "tokens": {"on": "same", "on again": "same", "off": tokens},
        "fixes": {"on": ["row-state"], "on again": ["row-state"], "off": off or []},
    }


def test_a_cost_within_the_noise_is_marked() -> None:
    real = [measured(5.0, noise) for noise in (0.4, 0.5, 0.6, 0.5, 0.5)]
    assert fixes.rows(real) == [["schedule", 20.0, 25.0, 5.0, 0.5]]
    lost = [measured(cost, -cost) for cost in (-1.0, 0.5, 1.0, 0.4, 0.6)]
    assert fixes.rows(lost) == [["schedule", 20.0, 20.5, [0.5, "~"], -0.5]]
    assert fixes.rows(real[:4])[0][3] == [5.0, "?"]
    assert fixes.rows([]) == []


def test_other_tokens_and_a_switch_that_is_not_obeyed_are_problems() -> None:
    rounds = [measured(1, 1), measured(1, 1, tokens="other"), measured(1, 1, off=["row-state"])]
    assert fixes.problems(rounds) == [
        "round 2: the engines returned different tokens",
        "round 3: the switch was not obeyed",
    ]
