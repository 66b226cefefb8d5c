"""The page of a run, opened in a real Chromium."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from bench import report
from playwright.sync_api import Browser, Page
from support import runs
from support.browser import DESKTOP, PHONE, Opened, browser, opening
from support.painted import PAINTED, contrast, luminance

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

    def showing(
        run: dict[str, Any],
        size: tuple[int, int] = DESKTOP,
        scheme: Literal["light", "dark"] = "light",
    ) -> Opened:
        file = tmp_path / "page.html"
        file.write_text(made(json.dumps(run)), encoding="utf-8")
        return open_file(file, size, scheme)

    with opening(started) as open_file:
        yield showing


@cache
def made(run: str) -> str:
    """The page of a run's JSON; drawing the plots takes long."""
    return report.page(json.loads(run))


def shown(page: Page) -> dict[tuple[str, ...], Any]:
    """Every figure of the tables: row, case, figure, "side" or "ratio", side to its value."""
    cells = page.eval_on_selector_all(
        "table.figures td[data-figure]", "cells => cells.map(cell => ({...cell.dataset}))"
    )
    found: dict[tuple[str, ...], Any] = {}
    for cell in cells:
        kind = "ratio" if "ratio" in cell else "side"
        key = (cell["row"], cell["case"], cell["figure"], kind, cell[kind])
        assert key not in found
        found[key] = json.loads(cell["value"])
    return found


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


def test_text_of_every_cell_is_its_value(show: Callable[..., Opened], run: dict[str, Any]) -> None:
    cells = show(run).page.eval_on_selector_all(
        "table.figures td[data-figure]",
        "cells => cells.map(c => [c.firstChild.data, c.dataset.value, !!c.dataset.ratio])",
    )
    assert len(cells) == len(runs.figures(run))
    for text, value, ratio in cells:
        assert text.removesuffix(" ~") == report.number(json.loads(value), ratio)


def test_the_machine_the_digests_and_the_command_are_there(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    page = show(run).page
    assert page.inner_text("#command") == run["command"]
    text = page.inner_text("main")
    for value in (*run["machine"].values(), *run["versions"].values(), *run["digests"].values()):
        assert str(value) in text
    for name in ("cut-off", "errors", "refused"):
        assert page.locator(f"#{name}").count() == 0


def test_the_plots_are_those_of_the_run_and_named(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    page = show(run).page
    names = page.eval_on_selector_all("svg", "all => all.map(e => e.getAttribute('aria-label'))")
    for row, found in list(run["rows"].items())[:2]:
        assert names.count(f"{row}: where the host waits in a step") == 1
        for case in found["cases"]:
            assert names.count(f"{row}, {case}: step time against output length") == 1
            assert names.count(f"{row}, {case}: timeline of three steps") == 1
    assert len(names) == 2 + 2 * 5
    assert "not seen from the process" in page.inner_text("#row-2 ~ p >> nth=-1")
    # Both lines of the row whose stock grows: one is level, the other is not.
    levels = page.eval_on_selector_all(
        "svg[aria-label='prime-rl-2772, presence: step time against output length'] path",
        """all => all.filter(e => /--(stock|overlaid)/.test(e.getAttribute('style')))
           .map(e => e.getBBox().height)""",
    )
    assert len(levels) == 2
    assert levels[0] > 30
    assert levels[1] < 1


def test_nothing_on_the_page_shares_an_id(show: Callable[..., Opened], run: dict[str, Any]) -> None:
    page = show(run).page
    ids = page.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 15
    uses = re.findall(r'(?:url\(#|href="#)([^)"]+)', page.content())
    assert set(uses) <= set(ids)


@pytest.mark.parametrize("kind", ["engine", "hostile", "table"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE, (320, 640)], ids=str)
def test_everything_can_be_read(
    show: Callable[..., Opened], size: tuple[int, int], scheme: Literal["light", "dark"], kind: str
) -> None:
    run = {"engine": runs.engine, "hostile": hostile, "table": runs.table}[kind]()
    page = show(run, size, scheme).page
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("document.body.scrollWidth") <= size[0]
    beyond = page.evaluate(
        """wide => [...document.querySelectorAll('body *')].filter(e =>
             !e.closest('.scroll, pre') && !e.closest('svg')
             && e.getBoundingClientRect().right > wide + 1).map(e => e.outerHTML.slice(0, 200))""",
        size[0],
    )
    assert beyond == []
    painted = page.evaluate(PAINTED)
    assert len(painted) > 40
    small = {each["text"] for each in painted if each["size"] < 11}
    assert small == set()
    faint = {each["text"] for each in painted if contrast(each["ink"], each["paper"]) < 4.5}
    assert faint == set()
    paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert paper < 0.1 if scheme == "dark" else paper > 0.9


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_bars_stand_out_in_both_schemes(
    show: Callable[..., Opened], run: dict[str, Any], scheme: str
) -> None:
    page = show(run, DESKTOP, scheme).page
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    marks = page.evaluate(
        """() => [...document.querySelectorAll('svg path')].flatMap(e => {
             const named = e.getAttribute('style').match(/(fill|stroke): var\\(--(?!rule)(\\w+)/);
             return named ? [[named[2], getComputedStyle(e)[named[1]]]] : [];
           })"""
    )
    assert {name for name, _ in marks} > {"stock", "overlaid", "mrv2", "sampling", "output", "copy"}
    assert {name for name, colour in marks if contrast(colour, paper) < 2} == set()


def test_a_refused_ratio_says_why_at_the_top(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    runs.refuse(run["rows"][SIDE]["cases"][CASE], "overlaid", DIFFERS)
    lost = "round 2: 4095 of 4096 logprobs"
    runs.refuse(run["rows"][OTHER]["cases"]["presence"], "stock", lost)
    run["rows"][OTHER]["cases"]["presence"]["counts"]["stock"][1]["logprobs"][0] = 4095
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
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    marked = page.locator("details span.refused").all_inner_texts()
    assert marked == ["logprobs 4,095 of 4,096"] * len(marked)
    assert marked


def test_that_model_runner_v2_differs_does_not_bury_the_page(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    for case in run["rows"][SIDE]["cases"].values():
        for _ in range(9):
            runs.refuse(case, "mrv2", DIFFERS)
    page = show(run, PHONE).page
    assert page.locator("#refused").count() == 0
    summary = page.locator("#summary").bounding_box()
    assert summary is not None
    assert summary["y"] < 2 * PHONE[1]
    page.locator("#others summary").click()
    assert page.locator("#others li").count() == 9 * len(run["rows"][SIDE]["cases"])
    assert DIFFERS in page.locator("#others li").first.inner_text()


def test_a_ratio_that_came_beside_a_problem_is_not_on_the_page(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    run["rows"][SIDE]["cases"][CASE]["problems"]["overlaid"].append(DIFFERS)
    found = shown(show(run).page)
    ours = {key: value for key, value in found.items() if key[:2] == (SIDE, CASE)}
    assert {value for key, value in ours.items() if key[3:] == ("ratio", "overlaid")} == {None}
    assert None not in {value for key, value in ours.items() if key[3:] == ("ratio", "mrv2")}


def test_a_cut_off_run_keeps_what_was_measured(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    run |= {"complete": False, "errors": [f"child failed (1):\n{runs.HOSTILE}"]}
    del run["rows"]["cpu-like"]
    row = run["rows"][OTHER]
    row["rounds"] = 1
    for case in row["cases"].values():
        case |= {"series": {}, "timeline": {}, "counts": {}, "fences": {}}
        case["problems"]["overlaid"] = ["was not measured"]
        for values in case["figures"].values():
            values |= {"overlaid": None, "ratios": {"overlaid": None}}
            values["rounds"]["overlaid"] = []
    page = show(run).page
    assert "stopped before its end" in page.inner_text("#cut-off")
    assert page.inner_text("#errors pre") == run["errors"][0]
    assert shown(page) == runs.figures(run)


def test_a_run_of_which_nothing_was_measured_has_a_page(
    show: Callable[..., Opened], run: dict[str, Any]
) -> None:
    run |= {"complete": False, "rows": {}, "errors": ["all"], "environment": {}, "digests": {}}
    run["machine"]["driver"] = run["versions"]["torch"] = None
    assert shown(show(run).page) == {}


def hostile() -> dict[str, Any]:
    """A run whose every text asks for trouble."""
    run = runs.engine()
    row = run["rows"].pop(SIDE)
    case = row["cases"].pop(CASE)
    case["problems"]["overlaid"] = [runs.HOSTILE * 4]
    case["parameters"] = {runs.HOSTILE: runs.HOSTILE * 4}
    case["series"]["mrv2"] = {"length": [1], "ms": [2.0]}
    case["series"]["stock"]["ms"][3] = None
    for spans in case["timeline"].values():
        spans[0] |= {"name": runs.HOSTILE, "track": runs.HOSTILE}
    case["fences"]["overlaid"] = [{runs.HOSTILE: 1}] * 3
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
    headings = page.locator("svg text").all_text_contents()
    assert any(runs.HOSTILE.startswith(each[:-1]) and each.endswith("…") for each in headings)
    assert runs.HOSTILE in page.title()


def test_the_page_of_a_table(show: Callable[..., Opened]) -> None:
    run = runs.table()
    page = show(run).page
    cells = page.eval_on_selector_all(
        "table.figures td",
        "all => all.map(e => [+e.dataset.row, e.dataset.figure, e.dataset.value, e.innerText])",
    )
    wanted = [
        (at, column, value)
        for at, row in enumerate(run["rows"])
        for column, value in zip(run["columns"], row, strict=True)
    ]
    assert [(at, column, json.loads(value)) for at, column, value, _ in cells] == wanted
    assert [text for *_, text in cells][2:5] == ["7.162", "0.1451", "49.4"]
    assert page.locator("#refused li").all_inner_texts() == run["problems"]
    assert page.evaluate("JSON.parse(document.getElementById('run').textContent)") == run
