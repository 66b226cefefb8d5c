"""The Markdown of a review, as a reader of Markdown understands it."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from review import markdown, page
from support import reviews
from support.reviews import HOSTILE

#: GitHub refuses a comment that is longer.
MOST = 65_536


def parsed(text: str) -> list[Token]:
    """The blocks of a Markdown text, with tables."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def shown_text(token: Token) -> str:
    """What a reader sees of a block's text: markup that the writer meant is left out."""
    children = token.children or []
    shown = {"text", "code_inline", "text_special"}
    return "".join(child.content for child in children if child.type in shown)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table."""
    rows: list[list[list[str]]] = []
    for token, after in pairwise(parsed(text)):
        if token.type == "table_open":
            rows.append([])
        elif token.type == "tr_open":
            rows[-1].append([])
        elif token.type in ("td_open", "th_open"):
            rows[-1][-1].append(shown_text(after))
    return rows


def headings(text: str) -> list[str]:
    """The text of each heading."""
    pairs = pairwise(parsed(text))
    return [shown_text(after) for token, after in pairs if token.type == "heading_open"]


def test_the_report_has_every_verdict_and_the_names_that_changed() -> None:
    review = reviews.review()
    text = markdown.report(review)
    assert headings(text) == [
        "vLLM 0.99.0 for overlay 0.5.0",
        "2 warnings",
        "Fixes: 1 of 3 can go",
        "Names that changed: 3 of 5 names that the overlay uses",
        "Upstream's own drift",
    ]
    patches, fixes, names, drift = tables(text)
    assert patches == [
        ["patch", "verdict", "why"],
        *([each["name"], each["verdict"], each["because"]] for each in review["patches"]),
    ]
    assert fixes[1:] == [
        [
            fix["name"],
            f"{fix['has']}: {fix['because']}",
            "12345",
            patch,
            fix["todo"],
        ]
        for fix, patch in zip(
            review["fixes"],
            ("0001-say-so.patch applies", "0004-fight.patch applies", "none of its own"),
            strict=True,
        )
    ]
    by_name = {name["name"]: name for name in review["names"]}
    order = ["vllm.one.Runner.run", "vllm.two.Batch.size", "vllm.one.Runner"]
    assert [line[0] for line in names[1:]] == [f"{name} function" for name in order]
    assert [line[1] for line in names[1:]] == [
        "signature changed",
        "body changed",
        "gone (found by its name alone)",
    ]
    assert [line[2] for line in names[1:]] == [by_name[name]["detail"] for name in order]
    assert [line[3] for line in names[1:]] == [
        *(f"vllm/one.py:5, now vllm/{now}" for now in ("one.py:9", "two.py:5")),
        "vllm/one.py:5",
    ]
    assert names[1][4] == "called, holds a seam by vllm/v1/b.py:2"
    users = [f"vllm/v1/readiness/user_{at}.py:{at}" for at in range(5)]
    assert names[2][4].endswith(f" by {', '.join(users[:3])}, and 2 more")
    assert all(user in markdown.document(review, {}) for user in users)
    assert drift[1:] == [
        ["vllm/one.py", "12", "8", "1"],
        ["vllm/two.py", "1,325", "1,543", "2"],
        ["vllm/three.py", "0", "0", "0"],
    ]
    counts = "1 patch applies as it is, 1 patch applies moved, 1 patch conflicts, 1 patch is obs"
    for phrase in (counts, "**conflicts**", review["release"]["sha256"], f"`{review['command']}`"):
        assert phrase in text
    for warning in review["warnings"]:
        assert f"- {warning}\n" in text


def test_the_document_also_has_each_patch_and_the_candidate() -> None:
    review = reviews.review()
    text = markdown.document(review, reviews.texts())
    for field in ("- Bug: <https://example.org/issues/1>", "- Forwarded: javascript:alert(1)"):
        assert text.count(field) == 4
    shown = headings(text)
    assert "moved line 1234 of 0.22.0, 1250 of 0.99.0 in Runner._sample #" in shown
    assert "gone line 5 of 0.22.0, nowhere in 0.99.0 in Runner._sample #" in shown
    assert text.endswith(
        "`make rebase RELEASE=0.99.0` lays it out in build/edit.\n\n"
        "- patches: `0001-say-so.patch`, `0002-move-it.patch`\n"
        "- merged cleanly: `vllm/one.py`\n- conflicts: `vllm/two.py`\n"
        "- VERSION_PIN: not written until the conflicts are resolved\n\n"
        "Made by `make review RELEASE=0.99.0` on 2026-11-22.\n"
    )


def test_a_review_of_nothing_is_short() -> None:
    empty: dict[str, Any] = {"patches": [], "fixes": [], "targets": [], "names": [], "warnings": []}
    review = {**reviews.review(), **empty, "candidate": None}
    for text in (markdown.report(review), markdown.document(review, {})):
        assert headings(text) == ["vLLM 0.99.0 for overlay 0.5.0"]
        assert tables(text) == []
        assert "There are no patches." in text


def test_hostile_text_makes_no_markup() -> None:
    review = reviews.hostile(reviews.review())
    text = markdown.report(review)
    patches, fixes, names, _ = tables(text)
    shown = " ".join(HOSTILE.split())
    for cell in patches[1]:
        assert cell.endswith(shown)
    assert {len(line) for line in (*patches, *fixes, *names)} == {3, 5}
    children = [child for token in parsed(text) for child in token.children or []]
    ours = {"code_inline", "html_inline", "strong_open", "strong_close", "text"}
    assert {child.type for child in children} == ours
    assert {child.content for child in children if child.type == "html_inline"} == {"<!-- -->"}
    assert {token.type for token in parsed(text)}.isdisjoint({"html_block", "fence", "hr"})


def test_nobody_is_mentioned_and_no_other_thread_linked() -> None:
    review = reviews.review()
    review["warnings"] = ["@property became #12 of vllm-project/vllm#43450, @overload too"]
    text = markdown.report(review)
    outside = re.sub(r"`[^`]*`", "", text)
    assert re.findall(r"@\w|(?<!#)#\d", outside) == []
    assert review["warnings"][0] in text.replace("<!-- -->", "").replace("\\", "")


@example("1. a")
@example("12) a")
@example("- a")
@example("+ a")
@example("# a")
@example("> a")
@given(st.text(st.sampled_from("ab1.)-+=#*_`|\\<>[]&;~$@! \n\t"), min_size=1, max_size=30))
def test_any_text_is_shown_as_it_is(text: str) -> None:
    one_line = " ".join(text.split())
    for rendered in (markdown.escape(text), f"- {markdown.escape(text)}"):
        blocks = [token for token in parsed(rendered) if token.type == "inline"]
        assert "".join(shown_text(block) for block in blocks) == one_line
        assert len(blocks) == (1 if one_line else 0)
    row = f"| a | b |\n| --- | --- |\n| {markdown.escape(text)} | {markdown.code(text, True)} |"
    ((_, cells),) = tables(row)
    assert cells == [one_line, one_line or " "]
    assert [shown_text(token) for token in parsed(f"x{markdown.code(text)}") if token.children] == [
        f"x{one_line or ' '}"
    ]


@pytest.mark.parametrize("number", [400, 4_000])
def test_it_fits_into_a_comment_and_counts_what_is_left_out(number: int) -> None:
    review = reviews.review()
    for key in ("names", "warnings", "patches", "fixes", "targets"):
        review[key] = [review[key][0]] * number
    text = markdown.report(review)
    assert len(text) <= MOST
    left = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) more are in", text)]
    lines = sum(len(table) - 1 for table in tables(text)) + text.count("\n- ")
    assert sum(left) + lines == 5 * number
    # Each section shows something.
    assert len(tables(text)) == 4
    assert "\n- " in text


def test_a_single_text_cannot_fill_it() -> None:
    review = reviews.review()
    review["patches"][0]["because"] = "*" * 100_000
    text = markdown.report(review)
    assert len(text) < 10_000
    assert len(tables(text)[0]) == 1 + len(review["patches"])


#: Few different lines, so that texts share many; some alike, some that would end a fence.
LINES = st.lists(
    st.sampled_from(["", "a = 1", "a = 2", "a = b(1)", "    b", "~~~", "z"]), max_size=40
)


@example(["~~~"], ["a = 1"], None)
@given(LINES, LINES, st.sampled_from([None, 1, 3]))
def test_a_diff_has_every_line(left: list[str], right: list[str], context: int | None) -> None:
    (token, *_) = parsed(markdown.diff(("old", left), ("new", right), context=context))
    if left == right:
        assert token.type == "paragraph_open"
        return
    assert (token.type, token.info) == ("fence", "diff")
    before, after, *lines = token.content.removesuffix("\n").split("\n")
    assert (before, after) == ("--- old", "+++ new")
    old = new = 0
    for line in lines:
        if line[0] == "@":
            header = [int(number) - 1 for number in re.findall(r"\d+", line)]
            assert left[old : header[0]] == right[new : header[1]]  # the lines left out
            old, new = header
        if line[0] in " -":
            assert line[1:] == left[old]
            old += 1
        if line[0] in " +":
            assert line[1:] == right[new]
            new += 1
    assert left[old:] == right[new:]
    if context is None:
        assert (old, new) == (len(left), len(right))


def test_a_line_follows_the_one_that_it_comes_from() -> None:
    left = ["self.rows = list(rows)", "other(thing)"]
    right = ["self.live = Live(self)", "self.rows = tuple(rows)"]
    text = markdown.diff(("old", left), ("new", right), numbered=False)
    assert "-self.rows = list(rows)\n+self.rows = tuple(rows)\n" in text


def test_invisible_characters_are_shown() -> None:
    text = page.visible("a\u202eb\u200bc\rd\x00\te\u2066")
    assert text == "a<U+202E>b<U+200B>c␍d␀\te<U+2066>"
