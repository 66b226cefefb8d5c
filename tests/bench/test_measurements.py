"""docs/measurements.md is generated from the committed runs, and no run misleads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import measurements
from bench.errors import Failure
from bench.measurements import Page
from bench.results import slices
from bench.results.run_file import load, save
from support import runs
from support.runs import pairs, slice_of

COMMITTED = {file.name: load(file) for file in measurements.files(measurements.RUNS)}
TEXT = "# Title\n\n<!-- slower -->\n\n<!-- table: a | overlaid/stock | tokens/s, ITL p50 -->\n"


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_run_has_both_sides_of_each_slice(name: str) -> None:
    run = COMMITTED[name]
    assert name.endswith(".json.gz")
    assert len(run["slices"]) >= 10
    for one in run["slices"]:
        first, second = (one["figures"][side] for side in one["sides"])
        assert first.keys() & second.keys()
        assert all(
            value is None or value >= 0 for value in first.values() if isinstance(value, float)
        )
    for (_, _, sides), of in slices.grouped(run["slices"]).items():
        if any(one["problems"] for one in of):
            assert "mrv2" in sides


def test_the_summary_is_up_to_date_and_short() -> None:
    assert measurements.main(["--check"]) == 0
    lines = measurements.PAGE.read_text().splitlines()
    assert len(lines) <= 200
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:3] == ["## Method", "## Through HTTP", "## Traffic"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a run in which the overlay is faster, slower and unclear."""
    sure = (0.8, 0.81, 0.79, 0.8, 0.82)
    whole = [
        *pairs(*(1 / each for each in sure), case="faster"),
        *pairs(*sure, case="slower"),
        *pairs(0.5, 1.5, 0.6, 1.2, 1.0, case="unclear"),
        *pairs(0.99, 0.99, 0.99, 0.98, case="too few"),
        *pairs(*sure, case="much slower", figure="ITL p50"),
        *[
            slice_of(n, None, 3.0, 1.0, case="refused", problems=["tokens differ"])
            for n in range(1, 6)
        ],
    ]
    run = runs.run(*whole)
    run["manifest"]["rounds"] = 5
    run["slices"] += [{**one, "round": 5} for one in pairs(0.99, case="too few")]
    save(tmp_path / "a.json.gz", run)
    return tmp_path


def test_the_worst_rows_come_first_and_no_refused_ratio_is_shown(folder: Path) -> None:
    text = Page(folder).text(TEXT)
    slower, _, table = text.partition("| case | tokens/s: overlaid | stock | ratio | ITL p50 |")
    listed = [line.split(" | ")[1] for line in slower.splitlines() if "json.gz" in line]
    assert listed == ["slower", "too few"]
    assert "1 more figures are worse by 3% or more, and are no claims." in slower
    cases = [line.strip("| ").split(" | ")[0] for line in table.strip().splitlines()[1:]]
    assert [c for c in cases if c in ("faster", "slower", "unclear", "too few")] == [
        *("slower", "unclear", "too few", "faster"),
    ]
    assert "refused |" not in text
    assert "Refused, because the sides returned different outputs: 1 more cases." in text


def test_the_level_is_corrected_for_the_cases_of_a_run(folder: Path) -> None:
    page = Page(folder)
    group = ("tiny", "slower", ("overlaid", "stock"))
    alone = slices.compare(slices.grouped(page.runs["a"]["slices"])[group], "tokens/s")
    shown = page.compare("a", group, "tokens/s")
    assert shown.low is not None
    assert alone.low is not None
    assert shown.low < alone.low


def cut_off(run: Any) -> None:
    run["complete"] = False


def fail(run: Any) -> None:
    run["problems"].append("slices failed")


def leave_out(run: Any) -> None:
    run["slices"] = [one for one in run["slices"] if one["case"] != "slower"]


def lose_the_manifest(run: Any) -> None:
    run["manifest"] = {}


def change_a_file(run: Any) -> None:
    run["manifest"]["changed"] = ["VERSION_PIN"]


@pytest.mark.parametrize("spoil", [cut_off, fail, leave_out, lose_the_manifest, change_a_file])
def test_a_run_that_would_mislead_is_not_published(
    folder: Path, spoil: Callable[[Any], None]
) -> None:
    run = load(folder / "a.json.gz")
    spoil(run)
    save(folder / "a.json.gz", run)
    with pytest.raises(Failure, match=r"a\.json\.gz "):
        Page(folder)


def test_runs_that_the_template_leaves_out_are_in_the_full_tables(folder: Path) -> None:
    save(folder / "b.json", load(folder / "a.json.gz"))
    with pytest.raises(Failure, match="folder: c"):
        Page(folder).text(TEXT.replace("table: a", "table: a, c"))
    assert "## a\n" in Page(folder).full()
    assert "## b\n" in Page(folder).full()
