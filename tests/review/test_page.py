"""The page of a review, opened in a real Chromium."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page
from review import page
from review.highlighting import visible
from review.page import FileTexts
from review.text_diff import lines_of
from support import reviews
from support.browser import DESKTOP, PHONE, browser, opening
from support.reviews import HOSTILE, ONE, THREE, TWO

OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"

#: The rows of a side-by-side table: number and text on the left, and on the right.
ROWS = """table => [...table.querySelectorAll('tr')].map(
  row => [...row.cells].map(cell => cell.textContent.replace(/\\n$/, '')))"""


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    """One Chromium for all tests."""
    with browser() as chromium:
        yield chromium


@pytest.fixture
def show(started: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open the page of a review; no page may log a message, fail, or load anything."""
    files = (tmp_path / f"page-{number}.html" for number in count())

    def showing(
        review: dict[str, Any],
        texts: dict[str, FileTexts] | None = None,
        size: tuple[int, int] = DESKTOP,
    ) -> Page:
        file = next(files)
        markup = page.render(review, reviews.texts() if texts is None else texts)
        file.write_text(markup, encoding="utf-8")
        return open_file(file, size, "light").page

    with opening(started) as open_file:
        yield showing


def tables(shown: Page, around: str) -> list[list[list[str]]]:
    """The rows of each table directly in the diff within an element."""
    return [
        table.evaluate(ROWS)
        for table in shown.locator(f"{around} > .diff > table").element_handles()
    ]


def section(path: str) -> str:
    """The section of a target."""
    return f"section[aria-labelledby='target-{path.replace('/', '-')}']"


def test_the_top_says_what_was_reviewed_and_one_line_a_patch(show: Callable[..., Page]) -> None:
    review = reviews.review()
    shown = show(review)
    head = shown.inner_text("#release")
    release = review["release"]
    for text in (release["version"], release["wheel"], release["sha256"], release["proof"]):
        assert text in head
    verdict = shown.inner_text("#verdict")
    assert verdict.startswith("Conflicts: ")
    assert verdict.endswith(
        "1 patch applies as it is, 1 patch applies moved, 1 patch conflicts, 1 patch is obsolete."
    )
    lines = shown.locator("#summary li")
    assert lines.all_inner_texts() == [
        f"{patch['verdict']} {patch['name']} {patch['because']}" for patch in review["patches"]
    ]
    links = lines.locator("a").evaluate_all("all => all.map(e => e.getAttribute('href'))")
    assert links == ["#patch-0001", "#patch-0002", "#patch-0004", "#patch-0011"]
    last = lines.last.bounding_box()
    assert last is not None
    assert last["y"] < DESKTOP[1] / 2
    assert shown.locator("#warnings li").all_inner_texts() == review["warnings"]
    assert shown.inner_text("#command") == review["command"]


def test_names_that_changed_come_first_and_the_uncertain_last(show: Callable[..., Page]) -> None:
    review = reviews.review()
    shown = show(review)
    names = shown.locator("#changed .what").all_inner_texts()
    assert names == ["vllm.one.Runner.run", "vllm.two.Batch.size", "vllm.one.Runner"]
    assert "5 names, of which 3 changed" in shown.inner_text("[aria-labelledby=names]")
    texts = shown.locator("#changed li").all_inner_texts()
    assert ["found by its name alone" in text for text in texts] == [False, False, True]
    by_name = {name["name"]: name for name in review["names"]}
    for name, text in zip(names, texts, strict=True):
        for value in (*by_name[name]["users"], by_name[name]["was"], by_name[name]["detail"]):
            assert value in text
        assert ("now" in text) == (by_name[name]["now"] not in (None, by_name[name]["was"]))
    assert texts[0].startswith("signature changed")
    assert not shown.locator("#unchanged .what").first.is_visible()
    shown.locator("#unchanged summary").click()
    same = shown.locator("#unchanged .what").all_inner_texts()
    assert same == ["vllm.two.Batch", "vllm.three"]


def test_a_patch_has_its_header_and_each_hunk_its_lines(show: Callable[..., Page]) -> None:
    review = reviews.review()
    shown = show(review)
    around = "section[aria-labelledby='patch-0002']"
    patch = review["patches"][1]
    fields = shown.locator(f"{around} dt").all_inner_texts()
    values = shown.locator(f"{around} dd").all_inner_texts()
    assert dict(zip(fields, values, strict=True)) == patch["header"]
    assert shown.locator(f"{around} dd a").get_attribute("href") == patch["header"]["Bug"]
    files = shown.locator(f"{around} > details")
    assert files.locator("> summary").all_inner_texts() == [
        f"{ONE} moved, 2 hunks",
        f"{TWO} applies, 1 hunk",
    ]
    # What applies as it is needs no look.
    assert files.evaluate_all("all => all.map(e => e.open)") == [True, False]
    hunk = shown.inner_text("#patch-0002-file-1-hunk-2")
    assert hunk == "moved line 1234 of 0.22.0, 1250 of 0.99.0 in Runner._sample #"
    assert "line 5 of 0.22.0, nowhere in 0.99.0" in shown.inner_text("#patch-0011-file-1-hunk-1")
    rows = shown.locator("#patch-0002-file-1-hunk-2 + .diff table").evaluate(ROWS)
    assert rows == [
        ["        take(out, this)", "        put(in_, this)"],
        ["", "        and_this()"],
    ]


def test_a_conflict_shows_three_texts_side_by_side(show: Callable[..., Page]) -> None:
    review = reviews.review()
    hunk = review["patches"][2]["files"][0]["hunks"][0]
    shown = show(review)
    columns = shown.locator("#patch-0004-file-1-hunk-1 + .three > div")
    assert columns.locator("b").all_inner_texts() == ["0.22.0", "0.22.0, overlaid", "0.99.0"]
    texts = columns.locator("pre").evaluate_all("all => all.map(e => e.textContent)")
    assert texts == ["".join(f"{line}\n" for line in hunk[k]) for k in ("base", "ours", "theirs")]
    differing = columns.locator(".x").all_inner_texts()
    assert [line.strip() for line in differing] == [
        *("base_line = 1", "our_line = 1", "their_line = 1", "", "their_other_line = 2")
    ]
    boxes = [each.bounding_box() for each in columns.all()]
    assert len({box["y"] for box in boxes if box}) == 1
    assert len({box["x"] for box in boxes if box}) == 3
    hunk["theirs"] = []
    assert show(review).locator(".three pre").all_inner_texts()[2] == "(no lines)"


def test_a_file_shows_the_release_beside_the_candidate(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    around = section(ONE)
    heads = shown.locator(f"{around} > .diff > .heads b").all_inner_texts()
    assert heads == ["0.99.0", "0.99.0, candidate"]
    (rows,) = tables(shown, around)
    assert rows[:3] == [
        ["1", "import one", "1", "import one"],
        ["", "", "2", "import ours"],
        ["2", "quiet_0 = 0", "3", "quiet_0 = 0"],
    ]
    assert len(rows) == 5
    # The rest is there for who wants it.
    rest = shown.locator(f"{around} > .diff > details.gap")
    assert rest.locator("summary").all_inner_texts() == ["40 unchanged lines from 5 and 6"]
    assert not rest.locator("pre").is_visible()
    rest.locator("summary").click()
    assert rest.locator("pre").is_visible()
    assert rest.locator("pre").text_content() == "".join(
        (
            *(f"quiet_{at} = {at}\n" for at in range(3, 40)),
            "\ndef run(self):\n",
            "    return fresh(one)",
        )
    )


def test_a_file_that_conflicts_shows_the_overlay_on_its_own_release(
    show: Callable[..., Page],
) -> None:
    shown = show(reviews.review())
    around = section(TWO)
    assert "there is no candidate" in shown.inner_text(f"{around} > p")
    heads = shown.locator(f"{around} > .diff > .heads b").all_inner_texts()
    assert heads == ["0.22.0", "0.22.0, overlaid"]
    assert "fresh" not in str(tables(shown, around))
    assert shown.locator(f"{section(ONE)} > p").count() == 0


def test_drift_is_folded_away_until_asked_for(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    drift = shown.locator("[id='target-vllm-two.py-drift']")
    summary = drift.locator("> summary")
    assert summary.inner_text() == (
        "Upstream’s own drift: 1,325 lines added, 1,543 removed, 2 functions touched"
    )
    assert not drift.locator("table").is_visible()
    summary.click()
    assert drift.locator("table").is_visible()
    (rows,) = tables(shown, "[id='target-vllm-two.py-drift']")
    assert rows[-1] == ["44", "    return old(two)", "44", "    return fresh(two)"]
    assert drift.locator("mark").all_inner_texts() == ["old", "fresh"]
    assert drift.locator("p code").all_inner_texts() == ["Batch.add", "Batch.gone"]


def test_the_overlay_on_its_own_release_mentions_no_other(show: Callable[..., Page]) -> None:
    review = reviews.review(own=True)
    shown = show(review)
    shown.evaluate(OPEN_ALL)
    text = shown.inner_text("body").lower()
    for word in ("drift", "candidate", "nowhere", "0.99.0,", "conflict", "rebase"):
        assert word not in text
    assert shown.title() == "Overlay 0.5.0 on vLLM 0.22.0"
    assert shown.inner_text("#verdict").startswith("Clean: ")
    assert shown.inner_text("#patch-0002-file-1-hunk-1").startswith("applies line 3 of 0.22.0 in")
    for path in (ONE, TWO, THREE):
        heads = shown.locator(f"{section(path)} > .diff > .heads b").all_inner_texts()
        assert heads == ["0.22.0", "0.22.0, overlaid"]
        assert "import ours" in str(tables(shown, section(path)))
    assert shown.locator("#changed li").count() == 0
    assert shown.locator("#unchanged li").count() == 5


def test_the_candidate_lists_what_merged_and_what_did_not(show: Callable[..., Page]) -> None:
    review = reviews.review()
    section_of_it = show(review).locator("[aria-labelledby=candidate]")
    assert "make rebase RELEASE=0.99.0" in section_of_it.inner_text()
    values = section_of_it.locator("dd").all_inner_texts()
    assert [value.split() for value in values[:3]] == [
        *(review["candidate"][key] for key in ("patches", "vendored", "conflicts"))
    ]
    assert values[3].startswith("not written")


@pytest.mark.parametrize("own", [False, True])
def test_every_link_leads_somewhere_and_what_it_leads_to_opens(
    show: Callable[..., Page], own: bool
) -> None:
    shown = show(reviews.review(own))
    ids = shown.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 20
    links = shown.eval_on_selector_all(
        "a[href^='#']", "all => all.map(e => e.getAttribute('href').slice(1))"
    )
    assert set(links) <= set(ids)
    headings = shown.eval_on_selector_all("h2, h3, h4", "all => all.map(e => e.innerHTML)")
    assert [heading for heading in headings if 'class="self"' not in heading] == []
    wanted = {"patch-0004", "patch-0002-file-1-hunk-1", "target-vllm-one.py", "name-vllm.two.Batch"}
    assert wanted <= set(links)
    # From a page where all is folded: by its address, by a click on a link that is in the
    # address already, and where the browser itself opens nothing.
    for name in sorted(set(links)):
        for go in (
            f"location.hash = '#{name}'",
            f"document.querySelector('a[href=\"#{name}\"]').click()",
            f"history.replaceState(null, '', '#{name}'); dispatchEvent(new Event('hashchange'))",
        ):
            shown.evaluate("document.querySelectorAll('details').forEach(e => e.open = false)")
            shown.evaluate(f"new Promise(done => {{ {go}; setTimeout(done, 0); }})")
            shown.wait_for_function(
                """name => {
                  const e = document.getElementById(name), box = e.getBoundingClientRect();
                  return e.checkVisibility() && !(e.tagName === 'DETAILS' && !e.open)
                    && box.bottom > 0 && box.top < innerHeight;
                }""",
                arg=name,
                timeout=5000,
            )


def nasty() -> dict[str, FileTexts]:
    """FileTexts whose lines would be markup, hide something, or break a layout."""
    lines = [
        HOSTILE,
        "<!-- <script>alert(1)</script> <td><tr></table>",
        "\tif a:\r",
        "x = '" + "long" * 500 + "'",
        "x = " + "a + " * 300,
        "# zero\u200bwidth \u2028 \x0c \x00 \ufeff",
        "'''never closed {{ 1 }}",
    ]
    old, new = "\n".join(lines), "\n".join(f"{line} # {at}" for at, line in enumerate(lines))
    return {f"{path} {HOSTILE}": FileTexts(old, new, new, old) for path in (ONE, TWO, THREE)}


def test_hostile_text_stays_text(show: Callable[..., Page]) -> None:
    review = reviews.hostile(reviews.review())
    for file in (file for patch in review["patches"] for file in patch["files"]):
        file["hunks"][0]["base"] = [HOSTILE, "y" * 3000]
    shown = show(review, nasty())
    shown.evaluate(OPEN_ALL)
    assert shown.locator("script").count() == 1
    assert shown.locator("img, td td, tr tr").count() == 0
    assert set(shown.eval_on_selector_all("a", "all => all.map(e => e.protocol)")) == {
        "file:",
        "https:",
    }
    text = shown.evaluate("document.body.textContent")
    for string in strings({**review, "schema": 0}):
        assert string in text or visible(string) in text, string
    texts = next(iter(nasty().values()))
    found_tables = tables(shown, "section[aria-labelledby*='target-vllm-two']")
    assert len(found_tables) == 1
    for at, side in ((1, texts.release), (3, texts.candidate or "")):
        assert [row[at] for row in found_tables[0]] == [visible(line) for line in lines_of(side)]


def strings(content: Any) -> Iterator[str]:
    """Every text of a JSON, but those that the page phrases itself."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in ("command", "title"):
                yield from strings(value)
    elif isinstance(content, list):
        for value in content:
            yield from strings(value)
    elif isinstance(content, str):
        yield content


@pytest.mark.parametrize("kind", ["usual", "hostile", "own"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=str)
def test_no_text_leaves_its_place(
    show: Callable[..., Page], size: tuple[int, int], kind: str
) -> None:
    review = reviews.review(own=kind == "own")
    texts = reviews.texts()
    if kind == "hostile":
        review, texts = reviews.hostile(review), nasty()
    shown = show(review, texts, size)
    shown.evaluate(OPEN_ALL)
    assert shown.evaluate("document.documentElement.scrollWidth") <= size[0]
    beyond = shown.evaluate(
        """wide => [...document.querySelectorAll('body *')].filter(e =>
             !e.parentElement.closest('.diff, pre') && e.getBoundingClientRect().right > wide + 1)
             .map(e => e.outerHTML.slice(0, 200))""",
        size[0],
    )
    assert beyond == []
    # No line runs into the column beside it.
    cells = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    assert shown.eval_on_selector_all(".diff td", cells) == []


def test_names_and_patches_of_one_name_keep_apart(show: Callable[..., Page]) -> None:
    review = reviews.review()
    review["names"] += review["names"]
    review["patches"].append({**review["patches"][0], "name": "0001-again.patch"})
    review["patches"].append({**review["patches"][0], "name": "without-number.patch"})
    review["names"].append({**review["names"][0], "name": "s"})
    shown = show(review)
    ids = shown.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert {"patch-0001", "patch-0001-again-2", "patch-without-number.patch"} <= set(ids)


def test_a_review_of_nothing_has_a_page(show: Callable[..., Page]) -> None:
    empty: dict[str, Any] = {"patches": [], "targets": [], "names": [], "warnings": []}
    shown = show({**reviews.review(), **empty, "candidate": None, "verdict": "clean"}, {})
    assert "There are no patches." in shown.inner_text("#verdict")
    assert shown.locator("#warnings, #names, #files, #candidate").count() == 0


def test_texts_that_are_equal_say_so(show: Callable[..., Page]) -> None:
    texts = reviews.texts()
    texts[ONE] = replace(texts[ONE], release=texts[ONE].base, candidate=texts[ONE].base)
    shown = show(reviews.review(), texts)
    assert "No line differs." in shown.inner_text(section(ONE))
    del texts[TWO]
    assert "not available" in show(reviews.review(), texts).inner_text(section(TWO))
