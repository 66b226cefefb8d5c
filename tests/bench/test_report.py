"""The report: no ratio where it would mean nothing, and a reason for each that is missing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import report
from bench.sides import Failure
from support import runs
from support.sites import REPO

PROGRAM = REPO / "scripts" / "bench" / "report.py"
ROW, CASE = "issue-43450", "mixed, batch 8"
DIFFERS = "tokens of stock round 1 and overlaid round 1 differ: request 3, position 17: 5 against 6"


@pytest.fixture
def run() -> dict[str, Any]:
    """A complete run without problems."""
    return runs.engine()


def lines(text: str, case: str, row: str = ROW) -> dict[str, list[str]]:
    """The cells of a case's lines in a row's table, by figure."""
    (part,) = [part for part in text.split("\n**") if part.startswith(f"{row}**")]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {
        cells[1]: [cell.strip() for cell in cells[2:]] for cells in rows if cells[0][1:] == case
    }


def test_a_line_has_the_medians_and_their_ratios(run: dict[str, Any]) -> None:
    found = lines(report.markdown(run), "no history")
    assert list(found) == list(run["rows"][ROW]["cases"]["no history"]["figures"])
    assert found["ITL p99"] == ["7.081", "6.996", "6.954", "0.988 ~", "0.982 ~"]
    assert found["sample_tokens p50"] == ["4.970", "0.8800", "0.8800", "0.177", "0.177"]
    assert found["fences, a step"][:3] == ["1.004", "0.0098", "0"]


def test_the_machine_and_the_command_come_first(run: dict[str, Any]) -> None:
    head = report.markdown(run).partition("**")[0]
    for part in ("H100", "570.124", "2026-11-21", "vLLM 0.22.0", "torch 2.11.0", "12ab12ab12ab"):
        assert part in head
    assert f"`{run['command']}`" in head


def test_fences_are_those_of_the_worst_round_and_of_a_thousand_steps(run: dict[str, Any]) -> None:
    run["rows"][ROW]["output"] = 4000
    case = run["rows"][ROW]["cases"][CASE]
    case["fences"] = {"stock": [{}, {}], "overlaid": [{"budget": 4}, {"budget": 10, "output": 1}]}
    text = report.markdown(run)
    said = "overlaid: budget 10 (2.500 a thousand steps), output 1 (0.2500 a thousand steps)"
    assert f"{CASE}: counts as expected, outputs identical. Fences by owner: stock: none" in text
    assert said in text


def test_a_problem_of_one_side_refuses_its_ratios_alone(run: dict[str, Any]) -> None:
    runs.refuse(run["rows"][ROW]["cases"][CASE], "overlaid", DIFFERS)
    text = report.markdown(run)
    assert {cells[3] for cells in lines(text, CASE).values()} == {"refused"}
    assert "refused" not in {cells[4] for cells in lines(text, CASE).values()}
    assert "refused" not in str(lines(text, "no history"))
    assert f"- {CASE}: overlaid: {DIFFERS}." in text


def test_a_problem_of_stock_refuses_every_ratio_even_one_that_is_there(
    run: dict[str, Any],
) -> None:
    case = run["rows"][ROW]["cases"][CASE]
    case["problems"]["stock"] = ["round 1: 4095 of 4096 tokens"]
    text = report.markdown(run)
    assert {cell for cells in lines(text, CASE).values() for cell in cells[3:]} == {"refused"}
    assert "4095 of 4096 tokens" in text


def test_a_ratio_that_the_run_does_not_have_is_not_made_here(run: dict[str, Any]) -> None:
    case = run["rows"][ROW]["cases"][CASE]
    case["figures"]["ITL p50"]["ratios"]["overlaid"] = None
    assert lines(report.markdown(run), CASE)["ITL p50"][3] == "refused"


def test_what_was_not_seen_is_neither_a_figure_nor_refused(run: dict[str, Any]) -> None:
    text = report.markdown(run)
    assert lines(text, "none", "cpu-like")["sample_tokens p50"] == ["-", "-", "-"]
    assert report.UNSEEN_NOTE in text


def test_rounds_that_overlap_or_are_too_few_mark_the_ratio() -> None:
    assert report.mark([1.0, 2.0], [1.9, 3.0]) == "~"
    assert report.mark([1.9, 3.0, 2.5], [1.0, 2.0, 1.1]) == "~"
    assert report.mark([1.0, 4.0], [2.0, 3.0]) == "~"
    assert report.mark([1.0, 2.0], [2.1, 3.0]) == "?"
    assert report.mark([1.0, 2.0, None], [2.1, 3.0, 2.5]) == "?"
    assert report.mark([1.0], [2.0]) == "?"
    assert report.mark([], [2.0]) == "?"
    assert report.mark([1.0, 2.0, 1.5], [2.1, 3.0, 2.5]) == ""
    assert report.mark([2.1, 3.0, 2.5], [1.0, 2.0, 1.5]) == ""


@pytest.mark.parametrize(("rounds", "shown"), [([7.0, 7.1, 7.2], "0.177"), ([7.0, 7.1], "0.177 ?")])
def test_few_rounds_are_marked_and_explained(
    run: dict[str, Any], rounds: list[float], shown: str
) -> None:
    figure = run["rows"][ROW]["cases"]["no history"]["figures"]["sample_tokens p50"]
    figure["rounds"]["stock"] = rounds
    text = report.markdown(run)
    assert lines(text, "no history")["sample_tokens p50"][3] == shown
    assert (report.MARKS[report.FEW] in text) == ("?" in shown)


def test_a_table_can_have_marks_too() -> None:
    run = runs.table()
    run["rows"][0][-1] = [49.4, report.NOISE]
    text = report.markdown(run)
    assert "| penalties | 1,024 | 7.162 | 0.1451 | 49.4 ~ |" in text
    assert report.MARKS[report.NOISE] in text


@pytest.mark.parametrize(
    ("value", "shown", "ratio"),
    [
        (None, "-", "-"),
        (0.0, "0", "0"),
        (38380.4, "38,380", "38,380"),
        (999.96, "1,000", "1,000"),
        (465.84, "465.8", "466"),
        (59.602, "59.60", "59.6"),
        (7.16234, "7.162", "7.162"),
        (0.05, "0.0500", "0.050"),
        (0.00002, "2e-05", "2e-05"),
        (12288, "12,288", "12,288"),
    ],
)
def test_numbers(value: float | None, shown: str, ratio: str) -> None:
    assert report.number(value) == shown
    assert report.number(value, ratio=True) == ratio


def test_a_cut_off_run_and_its_failures_are_said_first(run: dict[str, Any]) -> None:
    assert "CUT OFF" not in report.markdown(run)
    run |= {"complete": False, "errors": ["mrv2 failed (1):\n**bold**"]}
    text = report.markdown(run)
    assert text.index("CUT OFF") < text.index("FAILED: mrv2 failed (1):") < text.index(f"**{ROW}")


def test_a_table_is_shown_with_what_it_refuses() -> None:
    text = report.markdown(runs.table())
    assert "| penalties | 1,024 | 7.162 | 0.1451 | 49.4 |" in text
    assert "| penalties | 12,288 | 59.60 | 0.1404 | refused |" in text
    assert "- refused: penalties, 12288: the logits differ" in text
    assert "The logits are random." in text


def test_a_name_cannot_break_a_table() -> None:
    assert report.pipes(["a"], [["one | two\nthree"]], ["l"])[2] == r"| one \| two three |"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"schema": 2, "kind": "table"}', '{"schema": 1, "x": NaN}'),
        '{"schema": 1, "kind": "engine"}',
    ],
)
def test_what_is_no_run_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(Failure, match=r"run\.json"):
        report.load(file)


def command(*arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment or None,
    )


def test_the_command_writes_what_is_asked_for(tmp_path: Path, run: dict[str, Any]) -> None:
    file, html, text = (tmp_path / name for name in ("run.json", "run.html", "run.md"))
    file.write_text(json.dumps(run))
    assert command(file, "--html", html, "--markdown", text).returncode == 0
    assert text.read_text() == report.markdown(run) == command(file).stdout
    assert html.read_text() == report.page(run)
    refused = command(tmp_path / "missing.json")
    assert refused.returncode == 1
    assert "missing.json" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("lacking", ["jinja2", "matplotlib"])
def test_without_its_libraries_the_page_says_how_and_the_rest_works(
    tmp_path: Path, run: dict[str, Any], lacking: str
) -> None:
    (tmp_path / f"{lacking}.py").write_text(f"raise ImportError('no {lacking} here')")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    assert command(file, PYTHONPATH=str(tmp_path)).stdout == report.markdown(run)
    refused = command(file, "--html", tmp_path / "run.html", PYTHONPATH=str(tmp_path))
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert f"no {lacking} here" in line
    assert "build/env/bin/python scripts/bench/report.py" in line
