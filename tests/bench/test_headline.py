"""README's table of gains says what the committed runs say."""

import pytest
from bench import headline, measurements
from bench.measurements import Page
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
