"""How the page of a review is read: from warnings to diffs, with keys alone, and on a phone."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page
from review import entries, pieces, reach, warned
from support import reviews
from support.browser import DESKTOP, PHONE

OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"
#: What the tab key stops at.
STOPS = """() => [...document.querySelectorAll('a[href], summary, [tabindex]')].filter(
  e => e.tabIndex >= 0 && e.checkVisibility()).map(e => e.outerHTML.slice(0, 100))"""


def fold(shown: Page, anchor: str) -> Any:
    """The folded part that has an anchor."""
    return shown.locator(f"details:has(a[id='{anchor}'])")


@pytest.mark.parametrize(
    ("anchor", "name", "fate", "now"),
    [
        ("names-vllm.one.Runner", "Runner", "gone", None),
        ("names-vllm.one.Runner.run", "Runner.run", "signature changed", "vllm/one.py:9"),
        ("callees-vllm.three.rest", "rest", "signature changed", "vllm/three.py:7"),
        ("patched-vllm.three.one_more", "one_more", "new", "vllm/three.py:7"),
    ],
)
def test_a_changed_definition_shows_its_diff_and_upstreams_files(
    show: Callable[..., Page], anchor: str, name: str, fate: str, now: str | None
) -> None:
    shown = show(reviews.review())
    heading = shown.locator(f"h4:has(> a[id='{anchor}'])")
    assert not heading.is_visible()
    fold(shown, anchor).locator("> summary").click()
    assert heading.is_visible()
    assert heading.inner_text().split() == [name, *fate.split(), "#"]
    diff = shown.locator(f"h4:has(> a[id='{anchor}']) + p + p + .diff")
    text = diff.inner_text()
    assert ("b = 2" in text) == (now is not None)
    assert "return 1" in text
    assert "unchanged line" not in text  # what is above a definition is not its own
    numbers = diff.locator("td:nth-child(1), td:nth-child(3)").all_inner_texts()
    assert min(int(number) for number in numbers if number) == 5
    places = shown.locator(f"h4:has(> a[id='{anchor}']) + p + p a")
    upstream = "https://github.com/vllm-project/vllm/blob"
    links = [place.get_attribute("href") for place in places.all()]
    path = "vllm/one.py" if "one.R" in anchor else "vllm/three.py"
    was = [] if fate == "new" else [f"{upstream}/v0.22.0/{path}#L5"]
    line = now.rpartition(":")[2] if now else ""
    assert links == [*was, *([f"{upstream}/v0.99.0/{path}#L{line}"] if now else [])]


def test_a_diff_is_shown_once_and_what_needs_no_eyes_not_at_all(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    shown.evaluate(OPEN_ALL)
    heading = "h4:has(> a[id='mirrors-vllm.two.Batch.size'])"
    other = shown.locator(f"{heading} + p a")
    assert other.get_attribute("href") == "#names-vllm.two.Batch.size"
    assert shown.locator(f"{heading} + p + p + .diff").count() == 0
    assert "of_no_use" not in shown.inner_text("body")


def test_a_name_that_is_found_in_two_ways_has_two_anchors() -> None:
    review = reviews.review()
    review["names"] += [{**review["names"][2], "certain": False}] * 2
    anchors = [entry.anchor for entry in entries.entries(review)]
    assert len(set(anchors)) == len(anchors) == 8


def test_a_warning_leads_to_what_it_speaks_of(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    items = shown.locator(":has(> a[id='warnings']) + ul > li")
    texts = [re.sub(r" \(where\)$", "", text) for text in items.all_inner_texts()]
    assert texts == reviews.review()["warnings"]
    links = [[a.get_attribute("href") for a in item.locator("a").all()] for item in items.all()]
    assert links == [
        ["#names-vllm.two.Batch.size"],
        ["#names-vllm.one.Runner"],
        ["#0002-move-it.patch"],
        ["#patched-in-vllm-three.py", "#patched-vllm.three.one_more"],
        ["#word-one-fix"],
        [],
    ]


def test_a_warning_that_names_nothing_leads_to_its_section() -> None:
    review = reviews.review()
    (sentence,) = reach.warnings(review["classes"])
    review["warnings"] = [sentence]
    assert warned.lines(review, [], {}) == [
        f"- {pieces.escape(sentence)} [(where)](#classes)",
    ]


def test_one_can_skip_to_the_review_and_to_each_section(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    shown.keyboard.press("Tab")
    assert shown.locator(".skip:focus").is_visible()
    links = shown.locator("nav a")
    headings = shown.locator("h2").all_inner_texts()
    assert [f"{text} #" for text in links.all_inner_texts()] == [
        " ".join(text.split()) for text in headings
    ]
    shown.keyboard.press("Enter")
    assert shown.evaluate("document.activeElement.id") == "review"


def test_what_is_folded_and_links_to_themselves_are_no_tab_stops(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    folds = shown.locator("details details").count()
    closed = len(shown.evaluate(STOPS))
    shown.evaluate(OPEN_ALL)
    assert folds > 0
    assert len(shown.evaluate(STOPS)) > closed + folds
    assert not [stop for stop in shown.evaluate(STOPS) if ">#</a>" in stop]
    # Nor is there anything that must be scrolled by itself.
    wide = """() => [...document.querySelectorAll('body *')].filter(
      e => e.scrollWidth > e.clientWidth + 1
        && ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).length"""
    assert shown.evaluate(wide) == 0


def test_the_columns_of_all_tables_line_up(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    for nth in (1, 2, 3):
        edges = {
            round(box["x"])
            for cell in shown.locator(f"main > table th:nth-child({nth})").all()
            if (box := cell.bounding_box())
        }
        if nth < 3:
            assert len(edges) == 1, edges


def test_a_phone_shows_one_column_with_every_change_on_the_screen(
    show: Callable[..., Page],
) -> None:
    shown = show(reviews.review(), None, PHONE)
    shown.evaluate(OPEN_ALL)
    lines = """() => [...document.querySelectorAll('.diff tr')].map(row => [row.className,
      [...row.cells].filter((cell, n) => n % 2 && cell.checkVisibility()).map(
        cell => [cell.getBoundingClientRect().left, cell.getBoundingClientRect().right])])"""
    rows = shown.evaluate(lines)
    assert {kind: len(cells) for kind, cells in rows} == {"": 1, "g": 1, "n": 1, "x": 2}
    for _, cells in rows:
        for left, right in cells:
            assert 0 <= left < PHONE[0] / 2
            assert right <= PHONE[0]


def test_a_laptop_shows_two_columns(show: Callable[..., Page]) -> None:
    shown = show(reviews.review(), None, DESKTOP)
    shown.evaluate(OPEN_ALL)
    cell = shown.locator(".diff tr.n td:nth-child(4)").first.bounding_box()
    assert cell is not None
    assert cell["x"] > DESKTOP[0] / 3
