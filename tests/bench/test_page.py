"""The page of a run, opened in a real Chromium."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.reports import charts, figures, page
from playwright.sync_api import Browser, Page
from support import runs
from support.browser import DESKTOP, PHONE, Opened, browser, opening

SIDE, OTHER = "issue-43450", "prime-rl-2772"
CASE = "mixed, batch 8"
DIFFERS = "tokens of stock round 1 and overlaid round 1 differ: request 3, position 17: 5 against 6"


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with browser() as made:
        yield made


@pytest.fixture
def run() -> dict[str, Any]:
    """A complete run without problems."""
    return runs.engine()


@pytest.fixture
def show(started: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens the page of a run; at the end, nothing may have been amiss with it."""

    def showing(run: dict[str, Any], size: tuple[int, int] = DESKTOP) -> Opened:
        file = tmp_path / "page.html"
        file.write_text(page.page(run), encoding="utf-8")
        return open_file(file, size, "light")

    with opening(started) as open_file:
        yield showing


def shown(page: Page) -> dict[tuple[str, ...], Any]:
    """Every figure of the tables: row, case, figure, "side" or "ratio", side to its value."""
    cells = page.eval_on_selector_all(
        "table.figures td[data-figure]",
        "cells => cells.map(cell => ({...cell.dataset, text: cell.firstChild.data}))",
    )
    values: dict[tuple[str, ...], Any] = {}
    for cell in cells:
        kind = "ratio" if "ratio" in cell else "side"
        key = (cell["row"], cell["case"], cell["figure"], kind, cell[kind])
        assert key not in values
        values[key] = value = json.loads(cell["value"])
        if cell["text"] != figures.REFUSED:
            assert cell["text"].removesuffix(" ~") == figures.number(value, kind == "ratio")
    return values


def text_of(page: Page, row: str, case: str, figure: str, **which: str) -> str:
    """The text of one figure's cell."""
    wanted = {"row": row, "case": case, "figure": figure, **which}
    cells = page.locator("".join(["td", *(f'[data-{k}="{v}"]' for k, v in wanted.items())]))
    assert cells.count() == 1
    return cells.inner_text()


def test_every_figure_is_that_of_the_run_and_the_run_is_in_the_page(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    page = show(run).page
    assert shown(page) == runs.figures(run)
    assert page.evaluate("JSON.parse(document.getElementById('run').textContent)") == run
    assert text_of(page, SIDE, CASE, "tokens/s", side="stock").splitlines()[0] == "1,369"
    assert text_of(page, SIDE, CASE, "sample_tokens p50", ratio="mrv2") == "0.177"
    assert text_of(page, "cpu-like", "none", "step p50", side="stock") == "-"
    assert page.inner_text("#command") == run["command"]
    text = page.inner_text("main")
    for value in (*run["machine"].values(), *run["versions"].values(), *run["digests"].values()):
        assert str(value) in text
    for name in ("cut-off", "errors", "refused"):
        assert page.locator(f"#{name}").count() == 0


def test_the_charts_are_those_of_the_run(show: Callable[..., Opened], run: dict[str, Any]) -> None:
    page = show(run).page
    names = page.eval_on_selector_all("svg", "all => all.map(e => e.getAttribute('aria-label'))")
    drawn = [
        f"{name}, {case}: step time against output length"
        for name, row in list(run["rows"].items())[:2]
        for case in row["cases"]
    ]
    assert sorted(names) == sorted(drawn)
    assert "did not see where the host waits" in page.inner_text("#row-2 ~ p >> nth=-1")
    # Of the row whose stock grows, one line is level, the other is not.
    chart = "svg[aria-label='prime-rl-2772, presence: step time against output length'] polyline"
    heights = page.eval_on_selector_all(chart, "all => all.map(e => e.getBBox().height)")
    assert heights[0] > 30
    assert heights[1] < 1
    # The longest bar is stock's, which waits in sample_tokens.
    bars = page.eval_on_selector_all(
        ".bar",
        "all => all.map(e => [e.firstChild.data ?? e.innerText, "
        "[...e.querySelectorAll('i')].map(i => i.getBoundingClientRect().width)])",
    )
    stock = [widths for text, widths in bars if text.startswith("stock")]
    assert all(sampling > 50 * output for sampling, output in stock)
    assert max(sum(widths) for _, widths in bars) == max(map(sum, stock))


@pytest.mark.parametrize(
    ("high", "expected"),
    [
        (0.0, [0]),
        (6.68, [0, 2, 4, 6]),
        (512, [0, 200, 400]),
        (0.012, [0, 0.005, 0.01]),
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_ticks_are_few_and_round(high: float, expected: list[float]) -> None:
    assert charts.ticks(high) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["engine", "hostile", "table"])
def test_nothing_is_wider_than_a_phone(show: Callable[..., Opened], kind: str) -> None:
    run = {"engine": runs.engine, "hostile": hostile, "table": runs.table}[kind]()
    page = show(run, PHONE).page
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    beyond = page.evaluate(
        """wide => [...document.querySelectorAll('body *')].filter(e =>
             !e.closest('.scroll, pre') && !e.closest('svg')
             && e.getBoundingClientRect().right > wide + 1).map(e => e.outerHTML.slice(0, 200))""",
        PHONE[0],
    )
    assert beyond == []
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page.content())) <= set(ids)


def test_a_refused_ratio_says_why_at_the_top(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    runs.refuse(run["rows"][SIDE]["cases"][CASE], "overlaid", DIFFERS)
    lost = "round 2: 4095 of 4096 logprobs"
    runs.refuse(run["rows"][OTHER]["cases"]["presence"], "stock", lost)
    page = show(run).page
    reasons = page.locator("#refused li").all_inner_texts()
    assert reasons == [f"{SIDE}, {CASE}, overlaid: {DIFFERS}", f"{OTHER}, presence, stock: {lost}"]
    top = page.locator("#refused").bounding_box()
    assert top is not None
    assert top["y"] < DESKTOP[1] / 2
    assert text_of(page, SIDE, CASE, "ITL p50", ratio="overlaid") == "refused"
    assert text_of(page, SIDE, CASE, "ITL p50", ratio="mrv2") != "refused"
    assert text_of(page, OTHER, "presence", "ITL p50", ratio="overlaid") == "refused"
    # The summary has five ratios a case; both of the cases' lines refuse all of theirs.
    assert page.locator("#summary td.refused").count() == 2 * 5


def test_refusals_of_model_runner_v2_are_folded(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    for case in run["rows"][SIDE]["cases"].values():
        runs.refuse(case, "mrv2", DIFFERS)
    page = show(run, PHONE).page
    assert page.locator("#refused").count() == 0
    page.locator("#mrv2-refused summary").click()
    assert page.locator("#mrv2-refused li").count() == len(run["rows"][SIDE]["cases"])
    assert DIFFERS in page.locator("#mrv2-refused li").first.inner_text()


def test_a_ratio_beside_a_problem_is_not_on_the_page(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    run["rows"][SIDE]["cases"][CASE]["problems"]["overlaid"].append(DIFFERS)
    values = shown(show(run).page)
    ours = {key: value for key, value in values.items() if key[:2] == (SIDE, CASE)}
    assert {value for key, value in ours.items() if key[3:] == ("ratio", "overlaid")} == {None}
    assert None not in {value for key, value in ours.items() if key[3:] == ("ratio", "mrv2")}


def test_a_cut_off_run_keeps_what_was_measured(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    run |= {"complete": False, "errors": [f"child failed (1):\n{runs.HOSTILE}"]}
    del run["rows"]["cpu-like"]
    for case in run["rows"][OTHER]["cases"].values():
        case |= {"series": {}, "counts": {}, "fences": {}}
        case["problems"]["overlaid"] = ["was not measured"]
        for values in case["figures"].values():
            values |= {"overlaid": None, "ratios": {"overlaid": None}}
            values["rounds"]["overlaid"] = []
    page = show(run).page
    assert "stopped before its end" in page.inner_text("#cut-off")
    assert page.inner_text("#errors pre") == run["errors"][0]
    assert shown(page) == runs.figures(run)
    run |= {"rows": {}, "errors": ["all"], "environment": {}, "digests": {}}
    run["machine"]["driver"] = run["versions"]["torch"] = None
    assert shown(show(run).page) == {}


def hostile() -> dict[str, Any]:
    """A run whose every text asks for trouble."""
    run = runs.engine()
    row = run["rows"].pop(SIDE)
    case = row["cases"].pop(CASE)
    case["problems"]["overlaid"] = [runs.HOSTILE * 4]
    case["series"]["mrv2"] = {"length": [1], "ms": [2.0]}
    case["series"]["stock"]["ms"][3] = None
    row["cases"] = {runs.HOSTILE: case, "_hidden": row["cases"]["no history"]}
    row |= {"title": runs.HOSTILE, "source": runs.HOSTILE, "model": "/a" + "/directory" * 30}
    run["rows"] = {runs.HOSTILE: row, **run["rows"]}
    run["command"] = runs.HOSTILE + "x" * 900 + "</script ></script/><!-- <script "
    run["errors"] = [runs.HOSTILE + "y" * 900]
    run["machine"]["device"] = runs.HOSTILE
    return run


def test_names_stay_text(show: Callable[..., Opened]) -> None:
    run = hostile()
    page = show(run).page
    assert page.locator("script").count() == 1
    assert page.evaluate("JSON.parse(document.getElementById('run').textContent)") == run
    assert page.inner_text("#command") == run["command"]
    assert page.inner_text("#row-0") == runs.HOSTILE
    assert runs.HOSTILE in page.title()


def test_the_page_of_a_table(show: Callable[..., Opened]) -> None:
    run = runs.table()
    page = show(run).page
    cells = page.eval_on_selector_all(
        "table.figures td",
        "all => all.map(e => [+e.dataset.row, e.dataset.figure, e.dataset.value, e.innerText])",
    )
    wanted = [
        (number, column, value)
        for number, row in enumerate(run["rows"])
        for column, value in zip(run["columns"], row, strict=True)
    ]
    assert [(number, column, json.loads(value)) for number, column, value, _ in cells] == wanted
    assert [text for *_, text in cells][2:5] == ["7.162", "0.1451", "49.4"]
    assert page.locator("#refused li").all_inner_texts() == run["problems"]
