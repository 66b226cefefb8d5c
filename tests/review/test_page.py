"""The page of a review, opened in a real Chromium."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import Page
from review import markdown, page, pieces
from review.markdown import FileTexts
from support import reviews
from support.browser import DESKTOP, PHONE
from support.reviews import HOSTILE, ONE, THREE, TWO

OPEN_ALL = "document.querySelectorAll('details').forEach(each => each.open = true)"

#: The rows of a side-by-side table: number and text on the left, and on the right.
ROWS = """table => [...table.querySelectorAll('tr')].map(
  row => [...row.cells].map(cell => cell.textContent.replace(/\\n$/, '')))"""


def after(anchor: str, element: str) -> str:
    """The element that directly follows the heading with an anchor."""
    return f":has(> a[id='{anchor}']) + {element}"


def unfold(shown: Page, summary: str) -> None:
    """Click on what has this summary."""
    shown.locator("summary", has_text=re.compile(f"^{re.escape(summary)}$")).click()


def tables(shown: Page, around: str) -> list[list[list[str]]]:
    """The rows of each table of a diff."""
    return [t.evaluate(ROWS) for t in shown.locator(f"{around} > table").element_handles()]


def test_verdicts_and_fates_have_their_colours(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    for mood, words in {
        "good": {"applies", "same"},
        "eyes": {"moved", "obsolete", "body changed", "mended", "not known", "new"},
        "bad": {"conflicts", "gone", "signature changed"},
    }.items():
        assert set(shown.locator(f"strong.{mood}").all_text_contents()) == words
    last = shown.locator("table").first.bounding_box()
    assert last is not None
    assert last["y"] + last["height"] < DESKTOP[1]


def test_what_needs_no_look_is_folded_away(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    folded = shown.locator("details:not([open]) > summary").all_inner_texts()
    unfolded = shown.locator("details[open] > summary").all_inner_texts()
    assert [summary.partition(",")[0] for summary in unfolded] == [
        "0004-fight.patch: conflicts",
        "0011-gone.patch: obsolete",
    ]
    assert "2 names unchanged" in folded
    assert "0001-say-so.patch: applies" in [summary.partition(",")[0] for summary in folded]
    assert {ONE, TWO, THREE} <= set(folded)
    unfold(shown, TWO)
    folded = shown.locator("details:not([open]) > summary").all_inner_texts()
    drift = "Upstream's own drift: 1,325 lines added, 1,543 removed, 2 functions touched"
    assert drift in folded
    assert not shown.get_by_text("vllm.three function").is_visible()
    shown.get_by_text("2 names unchanged").click()
    assert shown.get_by_text("vllm.three function").is_visible()


def test_a_hunk_shows_the_lines_that_it_replaces(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    assert tables(shown, after("0002-move-it.patch-file-1-hunk-2", ".diff")) == [
        [
            ["1", "        take(out, this)", "1", "        put(in_, this)"],
            ["", "", "2", "        and_this()"],
        ]
    ]


def test_a_conflict_shows_three_texts(show: Callable[..., Page]) -> None:
    review = reviews.review()
    hunk = review["patches"][2]["files"][0]["hunks"][0]
    shown = show(review)
    place = after("0004-fight.patch-file-1-hunk-1", "p")
    assert shown.inner_text(place) == (
        "0004 conflicts with 0.99.0 at vllm/two.py:24, in Batch.add: likely only formatted. "
        "What it changes is at line 22 there."
    )
    assert "candidate/conflicts/0004-fight/vllm/two.py" in shown.inner_text(f"{place} + p")
    ours = f"{place} + p + .diff"
    theirs = f"{ours} + .diff"
    base = ["above = 0", *hunk["base"], "below = 1"]
    for around, name, lines in (
        (ours, "0.22.0, overlaid", ["above = 0", *hunk["ours"], "below = 1"]),
        (theirs, "0.99.0", ["above = 1", *hunk["theirs"], "below = 1"]),
    ):
        assert shown.locator(f"{around} .heads b").all_inner_texts() == ["0.22.0", name]
        (rows,) = tables(shown, around)
        assert [row[1] for row in rows if row[0]] == base
        assert [row[3] for row in rows if row[2]] == lines
    assert shown.locator(f"{ours} mark").all_inner_texts() == ["base_line", "our_line"]


def test_a_file_shows_the_release_beside_the_candidate(show: Callable[..., Page]) -> None:
    shown = show(reviews.review())
    unfold(shown, ONE)
    around = after("vllm-one.py", ".diff")
    assert shown.locator(f"{around} .heads b").all_inner_texts() == ["0.99.0", "0.99.0, candidate"]
    rows = tables(shown, around)[0]
    assert rows[:3] == [
        ["1", "import one", "1", "import one"],
        ["", "", "2", "import ours"],
        ["2", "quiet_0 = 0", "3", "quiet_0 = 0"],
    ]
    assert len(rows) == 5
    rest = shown.locator(f"{around} > details.gap")
    assert rest.locator("summary").all_inner_texts() == ["40 unchanged lines from 5 (def run)"]
    assert not rest.locator("pre").is_visible()
    rest.locator("summary").click()
    hidden = [*(f"quiet_{n} = {n}" for n in range(3, 40)), "", "def run(self):"]
    text = rest.locator("pre").text_content() or ""
    assert text.split("\n") == [*hidden, "    return fresh(one)"]


def test_a_file_that_conflicts_shows_the_overlay_on_its_own_release(
    show: Callable[..., Page],
) -> None:
    shown = show(reviews.review())
    unfold(shown, TWO)
    assert "there is no candidate" in shown.inner_text(":has(> a[id='vllm-two.py'])")
    around = after("vllm-two.py", ".diff")
    assert shown.locator(f"{around} .heads b").all_inner_texts() == ["0.22.0", "0.22.0, overlaid"]
    drift = shown.locator(f"{around} + details")
    drift.locator("> summary").click()
    (rows,) = tables(shown, f"{around} + details > .diff")
    assert rows[-1] == ["44", "    return old(two)", "44", "    return fresh(two)"]
    assert drift.locator("mark").all_inner_texts() == ["old", "fresh"]
    assert drift.locator(".gap").all_inner_texts() == ["40 unchanged lines from 1"]
    assert drift.locator("p code").all_inner_texts() == ["Batch.add", "Batch.gone"]


def test_the_overlay_on_its_own_release_mentions_no_other(show: Callable[..., Page]) -> None:
    shown = show(reviews.review(own=True))
    shown.evaluate(OPEN_ALL)
    text = shown.inner_text("body").lower()
    for word in ("drift", "candidate", "nowhere", "0.99.0,", "conflict", "rebase"):
        assert word not in text
    assert shown.title() == "Overlay 0.5.0 on vLLM 0.22.0"
    for path in ("one", "two", "three"):
        around = after(f"vllm-{path}.py", ".diff")
        assert "import ours" in str(tables(shown, around))


@pytest.mark.parametrize("own", [False, True])
def test_every_link_leads_somewhere_and_what_it_leads_to_opens(
    show: Callable[..., Page], own: bool
) -> None:
    """Without scripts: the browser itself unfolds what a link leads into."""
    shown = show(reviews.review(own))
    ids = shown.eval_on_selector_all("[id]", "all => all.map(e => e.id)")
    assert len(ids) == len(set(ids)) > 14
    links = shown.eval_on_selector_all(
        "a[href^='#']", "all => all.map(e => e.getAttribute('href').slice(1))"
    )
    # The words are what a matrix of releases leads to; not every file has a warning.
    assert set(links) <= set(ids)
    unlinked = {name for name in ids if name not in links}
    assert {re.sub("-.*", "", name) for name in unlinked} <= {"word", "names", "mirrors", "callees"}
    assert all("-in-" in name or name.startswith("word-") for name in unlinked)
    assert {name for name in ids if name.startswith("word-")} == (
        set() if own else {"word-one-fix", "word-two-fix"}
    )
    for name in ids:
        shown.evaluate("document.querySelectorAll('details').forEach(e => e.open = false)")
        shown.evaluate("name => { location.hash = ''; location.hash = name; }", name)
        shown.wait_for_function(
            """name => {
              const e = document.getElementById(name).closest(':not(a)');
              const box = e.getBoundingClientRect();
              return e.checkVisibility() && box.bottom > 0 && box.top < innerHeight;
            }""",
            arg=name,
            timeout=5000,
        )


def nasty() -> dict[str, FileTexts]:
    """Texts whose lines would be markup, hide something, or break a layout."""
    lines = [
        HOSTILE,
        "<!-- <script>alert(1)</script> <td><tr></table>",
        "~~~~",
        "\tif a:\r",
        "x = '" + "long" * 200 + "'",
        "x = " + "a + " * 150,
        "# zero\u200bwidth \u2028 \x0c \x00 \ufeff",
        "'''never closed {{ 1 }}",
    ]
    old, new = "\n".join(lines), "\n".join(f"{line} # {at}" for at, line in enumerate(lines))
    return {f"{path} {HOSTILE}": FileTexts(old, new, new, old) for path in (ONE, TWO)}


def test_hostile_text_stays_text(show: Callable[..., Page]) -> None:
    review = reviews.hostile(reviews.review())
    for file in (file for patch in review["patches"] for file in patch["files"]):
        file["hunks"][0]["base"] = [HOSTILE, "~~~", "y" * 1000]
    shown = show(review, nasty())
    shown.evaluate(OPEN_ALL)
    assert shown.locator("script, img, td td, tr tr").count() == 0
    assert set(shown.eval_on_selector_all("a[href]", "all => all.map(e => e.protocol)")) == {
        "file:"
    }
    text = "".join(shown.evaluate("document.body.textContent").split())
    for key in ("mirrors", "callees", "patched"):
        review[key] = [{**found, "ours": []} for found in review[key] if found.get("counts", True)]
    for patch in review["patches"]:
        patch["header"]["Description"] = markdown.described(patch["header"]["Description"])
    for string in strings({**review, "schema": 0, "proven": ""}):
        assert "".join(page.visible(string).split()) in text, string
    texts = next(iter(nasty().values()))
    heads = shown.locator(".heads", has_text="candidate")
    rows = shown.locator(".diff", has=heads).first.locator("table").evaluate(ROWS)
    for at, side in ((1, texts.release), (3, texts.candidate or "")):
        assert [row[at] for row in rows if row[at - 1]] == page.visible(side).split("\n")


def strings(content: Any) -> Iterator[str]:
    """Every text of a JSON, but those that the page phrases itself."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key == "diff":
                yield from (line[1:] for line in value.split("\n") if not line.startswith("@"))
            elif key != "command":
                yield from strings(value)
    elif isinstance(content, list):
        for value in content:
            yield from strings(value)
    elif isinstance(content, str):
        yield content


@pytest.mark.parametrize("kind", ["usual", "hostile"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=str)
def test_no_text_leaves_its_place(
    show: Callable[..., Page], size: tuple[int, int], kind: str
) -> None:
    review, texts = reviews.review(), reviews.texts()
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


def rendered(left: list[str], right: list[str]) -> str:
    """The page of a diff with line numbers."""
    return page.render("", pieces.diff(("old", left), ("new", right), context=page.CONTEXT))


def test_words_that_differ_are_emphasised_in_lines_that_are_alike() -> None:
    for new, words in (("z, x = fresh(1)", ["old", "z, ", "fresh"]), ("return None", [])):
        assert re.findall("<mark>(.*?)</mark>", rendered(["x = old(1)"], [new])) == words


def test_each_side_has_its_own_line_numbers() -> None:
    left = [f"line_{number}" for number in range(1, 31)]
    html = rendered(left, ["first", *left[:20], "other", *left[20:]])
    rows = re.findall(r"<td>(\d+)<td>line_(\d+)<td>(\d+)<td>line_(\d+)", html)
    numbers = [tuple(map(int, row)) for row in rows]
    expected = [(n, n, n + (1 if n < 21 else 2), n) for n in (1, 2, 3, *range(18, 24))]
    assert numbers == expected


SOURCE = st.text(st.sampled_from("ab1 \n\t'\"#@\\(){}=\u00fc"), max_size=60)


@given(SOURCE)
def test_colours_change_no_text(text: str) -> None:
    lines = page.highlighted(text.split("\n"))
    assert ["".join(word for _, word in line) for line in lines] == text.split("\n")


def test_python_has_its_colours() -> None:
    text = '@wraps\ndef run(self):\n    """One\n    two."""\n    return 1  # why'
    lines = page.highlighted(text.split("\n"))
    kinds = [list(dict.fromkeys(kind for kind, _ in line if kind)) for line in lines]
    assert kinds == [["d"], ["k", "f", "b"], ["s"], ["s"], ["k", "m", "c"]]
