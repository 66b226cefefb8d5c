"""README's table of gains says what the committed runs say."""

from typing import Any

import pytest
from bench import headline, measurements
from bench.errors import Failure
from bench.measurements import Page
from bench.results.run_file import Json, load
from bench.results.settings import Settings, settings_of
from bench.results.slices import grouped
from support import runs
from support.runs import pairs
from support.sites import REPO

README = (REPO / "README.md").read_text()


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(measurements.RUNS)


def test_readme_says_what_the_runs_say(page: Page) -> None:
    assert list(headline.faults(README, page)) == []


#: Row, the cell that is planted in one of its columns, and the fault that must be found.
FALSE = {
    "a thinking budget was configured": (
        *("nothing special, greedy", 0, "steady batches **1.46** (1.26 to 1.73)"),
        "1.46** (1.26 to 1.73) is no claim of such an engine",
    ),
    "two GPUs, and a thinking budget was configured": (
        *("nothing special, greedy", 0, "steady batches on two GPUs **1.55** (1.16 to 1.90)"),
        "1.55** (1.16 to 1.90) is no claim of such an engine",
    ),
    "a penalty, where a thinking budget was configured": (
        *("a presence penalty", 0, "steady batches on two GPUs **1.90** (1.55 to 2.11)"),
        "1.90** (1.55 to 2.11) is no claim of such an engine",
    ),
    "no thinking budget was configured": (
        *("the same, with `--reasoning-parser`", 0, "steady batches **1.38** (1.05 to 1.71)"),
        "1.38** (1.05 to 1.71) is no claim of such an engine",
    ),
    "two GPUs": (
        *("a presence penalty and a thinking budget", 0, "steady batches **2.30** (1.92 to 2.86)"),
        "2.30** (1.92 to 2.86) is no claim of such an engine",
    ),
    "two runs show no gain": (
        *("nothing special, greedy", 0, "steady batches **1.38** (1.05 to 1.71)"),
        "1 of 3 runs have a gain",
    ),
    "steady batches": (
        *("JSON or another grammar, a tenth of them", 0, "yes, **1.30** (1.05 to 1.84)"),
        "1.30** (1.05 to 1.84) is no claim of such an engine",
    ),
    "traffic is left out": (
        *("JSON or another grammar, a tenth of them", 0, "steady batches **1.30** (1.05 to 1.84)"),
        "it leaves out traffic of 128",
    ),
    "7B gains": ("a presence penalty", 0, "7B: no gain shown", "'7B' has a gain: 1.048"),
    "7B gains in a list": (
        *("nothing special: temperature 1", 0, "32 and fewer, 7B: no gain shown"),
        "'7B' has a gain: 1.012",
    ),
    "graphs": (
        *("nothing special: temperature 1", 0, "yes, **1.65** (1.28 to 2.13)"),
        "1.65** (1.28 to 2.13) is no claim of such an engine",
    ),
    "fewer requests": (
        *("mixed sampling: penalties, top-p, seeds, logprobs", 0, "yes, **1.26** (1.04 to 1.53)"),
        "1.26** (1.04 to 1.53) is no claim of such an engine",
    ),
    "other sides": (
        *("5 logprobs", 1, "**1.42** (1.03 to 1.95)"),
        "1.42** (1.03 to 1.95) is no claim of such an engine",
    ),
    "other requests": (
        *("a seed each", 0, "yes, **1.79** (1.45 to 2.21)"),
        "1.79** (1.45 to 2.21) is no claim of such an engine",
    ),
    "no claim": (
        *("a seed each", 1, "**1.09** (0.88 to 1.36)"),
        "1.09** (0.88 to 1.36) is no claim of such an engine",
    ),
    "a gain is kept quiet": ("5 logprobs", 1, "no gain shown", "'nothing' has a gain: 1.188"),
    "measured": ("a seed each", 1, "measure", "it was measured"),
    "not measured": ("bad words", 0, "13B: no gain shown", "'13B' was not measured"),
    "never measured": ("bad words", 1, "no gain shown", "'nothing' was not measured"),
    "no interval": ("bad words", 0, "yes, **1.90**", "neither a figure with its interval"),
    "two figures": (
        *("bad words", 0, "yes, **1.90** (1.33 to 2.71), **1.91** (1.33 to 2.71)"),
        "goes on after its figure",
    ),
}


@pytest.mark.parametrize("case", FALSE)
def test_a_false_cell_is_found(page: Page, case: str) -> None:
    row, column, cell, fault = FALSE[case]
    (line,) = (one for one in README.splitlines() if one.startswith(f"| {row} |"))
    cells = line.strip("| ").split(" | ")
    cells[column + 1] = cell
    found = list(headline.faults(README.replace(line, f"| {' | '.join(cells)} |"), page))
    assert any(fault in each for each in found), found
    assert all(each.startswith(f"{row}, ") for each in found)


def test_a_row_that_is_not_known_is_found(page: Page) -> None:
    (line,) = (one for one in README.splitlines() if one.startswith("| bad words |"))
    found = list(headline.faults(README.replace(line, line.replace("bad", "good")), page))
    assert found == ["rows that are not known, or missing: ['bad words', 'good words']"]


def test_the_engine_of_each_committed_comparison_is_known() -> None:
    reasoning = set[tuple[str, str]]()
    for file in measurements.files(measurements.RUNS):
        run = load(file)
        for group, of in grouped(run["slices"]).items():
            if {"tokens/s", "steps/s"} & of[0]["figures"][group[2][0]].keys():
                settings, _ = settings_of(run, group)
                if settings.reasoning:
                    reasoning.add((file.name.partition(".")[0], group[1]))
    assert reasoning == {
        ("h100-tensor-parallel", "plain"),
        ("h100-tensor-parallel", "presence 1.5"),
        ("h100-tensor-parallel", "presence 1.5, budget"),
        ("h100-thinking", "plain"),
        ("h100-thinking", "presence 1.5, budget"),
        ("h200-hybrid", "thinking-presence, 64"),
        ("h200-rows", "thinking, 128"),
    }


def described(engine: str, case: str, **changed: Any) -> tuple[Settings, str]:
    run: Json = runs.run(*pairs(1.0, case=case), **changed)
    return settings_of(run, (engine, case, ("overlaid", "stock")))


def test_the_settings_of_new_runs_are_those_of_their_labels() -> None:
    steady = "Steady batches, 256 tokens for each request."
    settings, requests = described("half-b decodes thinking TP=2", "presence, 32", title=steady)
    assert requests == "presence"
    assert settings == Settings(
        "steady", "0.5B", "decodes", 32, reasoning=True, gpus=2, device="H100", switch="-fixes"
    )
    assert str(settings) == "0.5B, decodes, thinking budget configured, 2 GPUs"
    own = described("half-b piecewise", "plain, 8", title=f"{steady} Model: mine.")[0]
    assert own.model == "mine"
    timed = "Closed-loop traffic, 4 s each. The engine core is in the client's process."
    assert described("seven-b full", "plain, 64", title=timed)[0].load == "steps"
    served, requests = described("seven-b, 4 API servers", "logprobs, 64")
    assert requests == "logprobs"
    assert (served.load, str(served), served.concurrency) == ("HTTP", "7B, 4 API servers", 64)
    with pytest.raises(Failure, match="nothing is known of the engine of unheard-of, plain"):
        described("unheard-of", "plain")
