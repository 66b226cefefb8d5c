"""The report: no ratio where it would mean nothing, and a reason for each that is missing."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from bench.errors import Failure
from bench.reports import figures
from bench.reports.markdown import CUT_OFF, SLICES, markdown, pipes
from bench.reports.page import page
from bench.reports.run_file import load, replace
from support import runs
from support.browser import PHONE, browser, opening
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


def test_the_report_names_the_machine_and_shows_medians_and_ratios(run: dict[str, Any]) -> None:
    text = markdown(run)
    head = text.partition(f"**{ROW}**: ")[0]
    for part in ("H100", "570.124", "2026-11-21", "vLLM 0.22.0", "torch 2.11.0", "12ab12ab12ab"):
        assert part in head
    assert f"`{run['command']}`" in head
    assert "VLLM_NO_USAGE_STATS=1" in head
    of_case = lines(text, "no history")
    assert list(of_case) == list(run["rows"][ROW]["cases"]["no history"]["figures"])
    assert of_case["ITL p99"] == ["7.081", "6.996", "6.954", "0.988 ~", "0.982 ~"]
    assert of_case["sample_tokens p50"] == ["4.970", "0.8800", "0.8800", "**0.177**", "**0.177**"]
    assert of_case["fences, a step"][:3] == ["1.004", "0.0098", "0"]
    # A figure that was not seen is neither shown nor refused.
    assert lines(text, "none", "cpu-like")["sample_tokens p50"] == ["-", "-", "-"]
    assert figures.UNSEEN_NOTE in text


def test_fences_are_those_of_the_worst_round_and_of_a_thousand_steps(run: dict[str, Any]) -> None:
    run["rows"][ROW]["output"] = 4000
    case = run["rows"][ROW]["cases"][CASE]
    case["fences"] = {"stock": [{}, {}], "overlaid": [{"budget": 4}, {"budget": 10, "output": 1}]}
    text = markdown(run)
    assert f"{CASE}: counts as expected, outputs identical. Fences by owner: stock: none" in text
    assert "overlaid: budget 10 (2.500 a thousand steps), output 1 (0.2500 a thousand" in text


def test_slices_have_intervals_that_count_all_claims(run: dict[str, Any]) -> None:
    case = run["rows"][ROW]["cases"][CASE]
    assert SLICES not in markdown(run)
    stock = [[100.0, 101.0, 99.0]] * 5
    faster = [[speed * (1.1 + number / 1000) for speed in stock[0]] for number in range(5)]
    case["speeds"] = {"stock": stock, "overlaid": faster, "mrv2": stock}
    ((_, one),) = [each for each in figures.intervals(run).items() if each[0][2] == "overlaid"]
    assert one.ratio == pytest.approx(1.102, abs=1e-4)
    assert one.low < one.ratio < one.high
    text = markdown(run)
    assert text.count(SLICES) == 1
    shown = rf"- {CASE}: overlaid 1\.102 \(1\.100 to 1\.104\), mrv2 1\.000 \(1\.000 to 1\.000\)"
    assert re.search(shown, text)
    loaded = {"run delay": 0.2, "steal": 0.0}
    case["disturbances"]["overlaid"] = [loaded, *case["disturbances"]["overlaid"][1:]]
    assert list(figures.intervals(run)) == [(ROW, CASE, "mrv2")]
    case["disturbances"]["overlaid"] = case["disturbances"]["stock"]
    for other in run["rows"][ROW]["cases"].values():
        other["speeds"] = case["speeds"]
    wider = figures.intervals(run)[ROW, CASE, "overlaid"]
    assert wider.low < one.low
    runs.refuse(case, "overlaid", "tokens differ")
    assert (ROW, CASE, "overlaid") not in figures.intervals(run)


@pytest.mark.parametrize("side", ["overlaid", "stock"])
def test_a_problem_refuses_ratios_even_where_the_run_has_them(
    run: dict[str, Any], side: str
) -> None:
    """That of one side its own, that of stock every side's."""
    run["rows"][ROW]["cases"][CASE]["problems"][side] = [DIFFERS]
    text = markdown(run)
    assert {cells[3] for cells in lines(text, CASE).values()} == {"refused"}
    assert ("refused" in {cells[4] for cells in lines(text, CASE).values()}) == (side == "stock")
    assert "refused" not in str(lines(text, "no history"))
    assert f"- {CASE}: {side}: {DIFFERS}." in text


def test_a_ratio_that_the_run_does_not_have_is_not_made_here(run: dict[str, Any]) -> None:
    run["rows"][ROW]["cases"][CASE]["figures"]["ITL p50"]["ratios"]["overlaid"] = None
    assert lines(markdown(run), CASE)["ITL p50"][3] == "unproven"


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (DIFFERS, "refused"),
        ("overlaid rounds 1, 2: 79 of 80 logprobs", "refused"),
        ("overlaid was not measured", "not measured"),
        ("overlaid round 1: the probe saw 3 of 4 steps", "unproven"),
        ("overlaid round 1: its clock counted 2.00 s, the parent's 4.00 s", "unproven"),
    ],
)
def test_a_missing_ratio_says_why(run: dict[str, Any], problem: str, word: str) -> None:
    runs.refuse(run["rows"][ROW]["cases"][CASE], "overlaid", problem)
    text = markdown(run)
    assert {cells[3] for cells in lines(text, CASE).values()} == {word}
    assert figures.WORDS[word] in text
    for other in figures.WORDS.keys() - {word}:
        assert other not in str(lines(text, CASE))


def test_get_output_is_neither_better_nor_worse(run: dict[str, Any]) -> None:
    """The wait that leaves sample_tokens is spent there, by design."""
    of_case = lines(markdown(run), "no history")
    assert of_case["get_output p50"][3:] == ["80.8", "81.6"]
    assert of_case["sample_tokens p50"][3] == "**0.177**"


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
    assert text.index(CUT_OFF) < text.index("FAILED: mrv2 failed (1):") < text.index(f"**{ROW}**: ")


def test_a_table_is_shown_with_its_marks_and_refusals() -> None:
    run = runs.table()
    run["rows"][0][-1] = [49.4, "~"]
    text = markdown(run)
    assert "| penalties | 1,024 | 7.162 | 0.1451 | 49.4 ~ |" in text
    assert "| penalties | 12,288 | 59.60 | 0.1404 | refused |" in text
    assert "- refused: penalties, 12288: the logits differ" in text
    assert "The logits are random." in text
    assert "~ marks a ratio whose rounds overlap" in text
    assert pipes(["a"], [["one | two\nthree"]], ["l"])[2] == r"| one \| two three |"


def hostile() -> dict[str, Any]:
    """A run whose every text asks for trouble."""
    run = runs.engine()
    row = run["rows"].pop(ROW)
    case = row["cases"].pop(CASE)
    case["problems"]["overlaid"] = [runs.HOSTILE * 4]
    row["cases"] = {runs.HOSTILE: case, **row["cases"]}
    row |= {"title": runs.HOSTILE, "source": runs.HOSTILE}
    run["rows"] = {runs.HOSTILE: row, **run["rows"]}
    run["command"] = runs.HOSTILE + "x" * 900 + "</script ></script/><!-- <script "
    run["errors"] = [f"{runs.HOSTILE}\n{runs.HOSTILE}{'y' * 900}"]
    run["machine"]["device"] = runs.HOSTILE
    return run


def test_the_page_shows_the_report_as_text_and_fits_a_phone(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    with browser() as started, opening(started) as show:
        for run in (runs.engine(), runs.table(), hostile()):
            file.write_text(page(run), encoding="utf-8")
            opened = show(file, PHONE, "light").page
            assert opened.locator("script").count() == 0
            assert opened.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
            assert run["machine"]["device"] in opened.title()
            rows = [line for line in markdown(run).splitlines() if line.startswith("| ")]
            wanted = [
                cell.strip().replace(r"\|", "|")
                for row in rows
                for cell in re.split(r"(?<!\\)\|", row)[1:-1]
                if "---" not in cell
            ]
            cells = "all => all.map(cell => cell.textContent)"
            assert opened.eval_on_selector_all("td, th", cells) == [w.strip("*") for w in wanted]


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


def test_the_command_prints_the_markdown_and_writes_the_page(
    tmp_path: Path, run: dict[str, Any]
) -> None:
    file, html = (tmp_path / name for name in ("run.json", "run.html"))
    file.write_text(json.dumps(run))
    done = command(file, "--html", html)
    assert (done.returncode, done.stdout) == (0, markdown(run))
    assert html.read_text() == page(run)
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "markdown_it.py").write_text("raise ImportError('none here')")
    lacking = command(file, "--html", html, path=str(tmp_path / "hidden"))
    refused = command(tmp_path / "missing.json")
    assert lacking.stdout == markdown(run)
    for failed, reason in ((lacking, "markdown-it-py"), (refused, "missing.json")):
        assert failed.returncode == 1
        assert reason in failed.stderr
        assert failed.stderr.count("\n") == 1
