"""README's table of gains says what the committed runs say."""

from typing import Any

import pytest
from bench import headline, measurements
from bench.errors import Failure
from bench.measurements import Page
from bench.results.run_file import Json
from bench.results.settings import Settings, settings_of
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
        *("a presence penalty and a thinking budget", 0, "yes, **1.41** (1.18 to 1.70)"),
        "1.41** (1.18 to 1.70) is no claim of such an engine",
    ),
    "one of two runs has a gain": (
        *("a presence penalty", 1, "**1.17** (1.03 to 1.32). Full graphs: no gain shown"),
        "1 of 2 runs have a gain",
    ),
    "traffic is left out": (
        *("a presence penalty", 0, "full graphs **2.06** (1.72 to 2.46)"),
        "it leaves out 128 at a time",
    ),
    "a list gains": (
        *("nothing special: temperature 1", 0, "32 and fewer, full graphs: no gain shown"),
        "'full graphs' has a gain: 1.65",
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


def described(engine: str, case: str, **changed: Any) -> tuple[Settings, str]:
    run: Json = runs.run(*pairs(1.0, case=case), **changed)
    return settings_of(run, (engine, case, ("overlaid", "stock")))


def test_the_settings_of_new_runs_are_those_of_their_labels() -> None:
    settings, requests = described("half-b decodes thinking", "presence, 32")
    assert requests == "presence"
    assert settings == Settings(
        "traffic", "0.5B", "decodes", 32, reasoning=True, device="H100", switch="-fixes"
    )
    assert str(settings) == "0.5B, decodes, thinking budget configured"
    own = described("half-b, 1 API server", "own traffic", title="Served. Model: mine.")[0]
    assert (own.model, own.concurrency) == ("mine", 0)
    timed = "Closed-loop traffic, 4 s each. The engine core is in the client's process."
    assert described("seven-b full", "plain, 64", title=timed)[0].load == "steps"
    served, requests = described("seven-b, 4 API servers", "logprobs, 64")
    assert requests == "logprobs"
    assert (served.load, str(served), served.concurrency) == ("HTTP", "7B, 4 API servers", 64)
    with pytest.raises(Failure, match="nothing is known of the engine of unheard-of, plain"):
        described("unheard-of", "plain, 4")
