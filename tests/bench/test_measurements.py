"""docs/measurements.md is generated from the committed runs, and no run misleads."""

from pathlib import Path
from typing import Any

import pytest
from bench import measurements
from bench.errors import Failure
from bench.measurements import Page
from bench.run import save
from support import runs
from support.runs import pairs

TEXT = "# Title\n\n<!-- slower -->\n\n<!-- table: a | overlaid/stock | tokens/s, ITL p50 -->\n"


def test_the_pages_are_up_to_date_and_short() -> None:
    pages = measurements.pages()
    for path in (measurements.README, measurements.PAGE):
        assert path.read_text() == pages[path], f"run bench.measurements: {path}"
    lines = measurements.PAGE.read_text().splitlines()
    assert len(lines) <= 200
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:3] == ["## Method", "## Through HTTP", "## Traffic"]


def page(folder: Path, **changed: Any) -> Page:
    """A page of a run in which the overlay is faster, slower and unclear."""
    sure = (0.8, 0.81, 0.79, 0.8, 0.82)
    whole = [
        *pairs(*(1 / each for each in sure), case="faster"),
        *pairs(*sure, case="slower"),
        *pairs(0.5, 1.5, 0.6, 1.2, 1.0, case="unclear"),
        *pairs(0.9, 0.9, 0.9, 0.9, case="too few"),
        *pairs(*sure, case="much slower", figure="ITL p50"),
    ]
    save(folder / "a.json.gz", runs.run(*whole, **changed))
    return Page(folder)


def test_the_worst_rows_come_first_and_figures_without_a_claim_are_counted(tmp_path: Path) -> None:
    text = page(tmp_path).text(TEXT)
    slower, _, table = text.partition("| case | tokens/s: overlaid | stock | ratio | ITL p50 |")
    listed = [line.split(" | ")[1] for line in slower.splitlines() if "json.gz" in line]
    assert listed == ["slower"]
    assert "2 more figures are worse by 3% or more, and are no claims." in slower
    cases = [line.strip("| ").split(" | ")[0] for line in table.strip().splitlines()[1:]]
    assert [case for case in cases if case != "much slower"] == [
        *("slower", "unclear", "too few", "faster"),
    ]


def test_the_level_is_corrected_for_the_cases_of_a_run(tmp_path: Path) -> None:
    made = page(tmp_path)
    group = ("tiny, none", "slower", ("overlaid", "stock"))
    alone, shown = made.runs["a"].compare(group, "tokens/s"), made.compare("a", group, "tokens/s")
    assert shown.low is not None
    assert alone.low is not None
    assert shown.low < alone.low


@pytest.mark.parametrize(
    "spoilt",
    [{"complete": False}, {"problems": ["failed"]}, {"commit": ""}, {"commit": "ab12-dirty"}],
)
def test_a_run_that_would_mislead_is_not_published(tmp_path: Path, spoilt: dict[str, Any]) -> None:
    with pytest.raises(Failure, match=r"a\.json\.gz "):
        page(tmp_path, **spoilt)


def test_a_template_that_names_a_missing_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="folder: c"):
        page(tmp_path).text(TEXT.replace("table: a", "table: a, c"))
