"""The report: no ratio where it would mean nothing, and a reason for each that is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bench.errors import Failure
from bench.reports import figures
from bench.reports.markdown import CUT_OFF, markdown, pipes
from bench.reports.page import page
from bench.reports.run_file import load, replace
from support import runs
from support.sites import REPO

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
    of_case = lines(markdown(run), "no history")
    assert list(of_case) == list(run["rows"][ROW]["cases"]["no history"]["figures"])
    assert of_case["ITL p99"] == ["7.081", "6.996", "6.954", "0.988 ~", "0.982 ~"]
    assert of_case["sample_tokens p50"] == ["4.970", "0.8800", "0.8800", "0.177", "0.177"]
    assert of_case["fences, a step"][:3] == ["1.004", "0.0098", "0"]


def test_the_machine_and_the_command_come_first(run: dict[str, Any]) -> None:
    head = markdown(run).partition("**")[0]
    for part in ("H100", "570.124", "2026-11-21", "vLLM 0.22.0", "torch 2.11.0", "12ab12ab12ab"):
        assert part in head
    assert f"`{run['command']}`" in head


def test_fences_are_those_of_the_worst_round_and_of_a_thousand_steps(run: dict[str, Any]) -> None:
    run["rows"][ROW]["output"] = 4000
    case = run["rows"][ROW]["cases"][CASE]
    case["fences"] = {"stock": [{}, {}], "overlaid": [{"budget": 4}, {"budget": 10, "output": 1}]}
    text = markdown(run)
    assert f"{CASE}: counts as expected, outputs identical. Fences by owner: stock: none" in text
    assert "overlaid: budget 10 (2.500 a thousand steps), output 1 (0.2500 a thousand" in text


def test_a_problem_of_one_side_refuses_its_ratios_alone(run: dict[str, Any]) -> None:
    runs.refuse(run["rows"][ROW]["cases"][CASE], "overlaid", DIFFERS)
    text = markdown(run)
    assert {cells[3] for cells in lines(text, CASE).values()} == {"refused"}
    assert "refused" not in {cells[4] for cells in lines(text, CASE).values()}
    assert "refused" not in str(lines(text, "no history"))
    assert f"- {CASE}: overlaid: {DIFFERS}." in text


def test_a_problem_of_stock_refuses_every_ratio_even_one_that_is_there(
    run: dict[str, Any],
) -> None:
    run["rows"][ROW]["cases"][CASE]["problems"]["stock"] = ["round 1: 4095 of 4096 tokens"]
    text = markdown(run)
    assert {cell for cells in lines(text, CASE).values() for cell in cells[3:]} == {"refused"}
    assert "4095 of 4096 tokens" in text


def test_a_ratio_that_the_run_does_not_have_is_not_made_here(run: dict[str, Any]) -> None:
    run["rows"][ROW]["cases"][CASE]["figures"]["ITL p50"]["ratios"]["overlaid"] = None
    assert lines(markdown(run), CASE)["ITL p50"][3] == "refused"


def test_a_figure_that_was_not_seen_is_neither_shown_nor_refused(run: dict[str, Any]) -> None:
    text = markdown(run)
    assert lines(text, "none", "cpu-like")["sample_tokens p50"] == ["-", "-", "-"]
    assert figures.UNSEEN_NOTE in text


@pytest.mark.parametrize(
    ("one", "other", "mark"),
    [
        ([1.0, 2.0], [1.9, 3.0], "~"),
        ([1.9, 3.0, 2.5], [1.0, 2.0, 1.1], "~"),
        ([1.0, 4.0], [2.0, 3.0], "~"),
        ([1.0, 2.0], [2.1, 3.0], "?"),
        ([1.0, 2.0, None], [2.1, 3.0, 2.5], "?"),
        ([], [2.0], "?"),
        ([1.0, 2.0, 1.5], [2.1, 3.0, 2.5], ""),
        ([2.1, 3.0, 2.5], [1.0, 2.0, 1.5], ""),
    ],
)
def test_rounds_that_overlap_or_are_too_few_mark_the_ratio(
    one: list[float | None], other: list[float | None], mark: str
) -> None:
    assert figures.mark(one, other) == mark


@pytest.mark.parametrize(("rounds", "shown"), [([7.0, 7.1, 7.2], "0.177"), ([7.0, 7.1], "0.177 ?")])
def test_few_rounds_are_marked_and_explained(
    run: dict[str, Any], rounds: list[float], shown: str
) -> None:
    figure = run["rows"][ROW]["cases"]["no history"]["figures"]["sample_tokens p50"]
    figure["rounds"]["stock"] = rounds
    text = markdown(run)
    assert lines(text, "no history")["sample_tokens p50"][3] == shown
    assert (figures.MARKS[figures.FEW] in text) == ("?" in shown)


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
    assert figures.number(value) == shown
    assert figures.number(value, ratio=True) == ratio


def test_a_cut_off_run_and_its_failures_are_named_first(run: dict[str, Any]) -> None:
    assert CUT_OFF not in markdown(run)
    run |= {"complete": False, "errors": ["mrv2 failed (1):\n**bold**"]}
    text = markdown(run)
    assert text.index(CUT_OFF) < text.index("FAILED: mrv2 failed (1):") < text.index(f"**{ROW}")


def test_a_table_is_shown_with_its_marks_and_refusals() -> None:
    run = runs.table()
    run["rows"][0][-1] = [49.4, figures.NOISE]
    text = markdown(run)
    assert "| penalties | 1,024 | 7.162 | 0.1451 | 49.4 ~ |" in text
    assert "| penalties | 12,288 | 59.60 | 0.1404 | refused |" in text
    assert "- refused: penalties, 12288: the logits differ" in text
    assert "The logits are random." in text
    assert figures.MARKS[figures.NOISE] in text


def test_a_name_cannot_break_a_table() -> None:
    assert pipes(["a"], [["one | two\nthree"]], ["l"])[2] == r"| one \| two three |"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"schema": 2, "kind": "table"}', '{"schema": 1, "x": NaN}'),
        '{"schema": 1, "kind": "engine"}',
    ],
)
def test_a_file_that_is_not_a_run_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(Failure, match=r"run\.json"):
        load(file)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.json"
    replace(file, "one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            replace(file, "two")
    assert file.read_text() == "one"
    replace(file, "two")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["two"]


def command(*arguments: object, path: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "bench.report", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(filter(None, [path, str(REPO / "scripts")]))},
    )


def test_the_command_writes_what_is_asked_for(tmp_path: Path, run: dict[str, Any]) -> None:
    file, html, text = (tmp_path / name for name in ("run.json", "run.html", "run.md"))
    file.write_text(json.dumps(run))
    assert command(file, "--html", html, "--markdown", text).returncode == 0
    assert text.read_text() == markdown(run) == command(file).stdout
    assert html.read_text() == page(run)
    refused = command(tmp_path / "missing.json")
    assert refused.returncode == 1
    assert "missing.json" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_without_jinja2_the_page_says_how_and_the_rest_works(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no jinja2 here')")
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    assert command(file, path=str(tmp_path)).stdout == markdown(run)
    refused = command(file, "--html", tmp_path / "run.html", path=str(tmp_path))
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    assert "no jinja2 here" in line
    assert "build/env/bin/python -m bench.report" in line
