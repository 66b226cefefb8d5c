"""The Markdown of a review, as a reader of Markdown understands it."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from review import markdown
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


def test_it_says_what_the_page_says() -> None:
    review = reviews.review()
    text = markdown.render(review)
    assert headings(text) == [
        "vLLM 0.99.0 for overlay 0.5.0",
        "2 warnings",
        "Names that changed: 3 of 5 names that the overlay uses",
        "Upstream's own drift",
    ]
    patches, names, drift = tables(text)
    assert patches == [
        ["patch", "verdict", "why"],
        *([each["name"], each["verdict"], each["because"]] for each in review["patches"]),
    ]
    by_name = {name["name"]: name for name in review["names"]}
    order = ["vllm.one.Runner.run", "vllm.two.Batch.size", "vllm.one.Runner"]
    assert [line[0] for line in names[1:]] == order
    assert [line[1] for line in names[1:]] == [
        "signature changed",
        "body changed",
        "gone (found by its name alone)",
    ]
    assert [line[2] for line in names[1:]] == [by_name[name]["detail"] for name in order]
    assert names[1][3] == "vllm/v1/b.py:2"
    users = [f"vllm/v1/readiness/user_{at}.py:{at}" for at in range(3)]
    assert names[2][3] == ", ".join([*users, "and 2 more"])
    assert drift[1:] == [
        ["vllm/one.py", "12", "8", "1"],
        ["vllm/two.py", "1,325", "1,543", "2"],
        ["vllm/three.py", "0", "0", "0"],
    ]
    for phrase in ("**Conflicts: ", review["release"]["sha256"], "`make review RELEASE=0.99.0`"):
        assert phrase in text
    for warning in review["warnings"]:
        assert f"- {warning}\n" in text


def test_the_overlay_on_its_own_release_has_no_drift() -> None:
    text = markdown.render(reviews.review(own=True))
    assert headings(text)[0] == "Overlay 0.5.0 on vLLM 0.22.0"
    assert "drift" not in text
    assert "Names that changed: 0 of 5" in text
    assert len(tables(text)) == 1


def test_a_review_of_nothing_is_short() -> None:
    empty: dict[str, Any] = {"patches": [], "targets": [], "names": [], "warnings": []}
    text = markdown.render({**reviews.review(), **empty})
    assert headings(text) == ["vLLM 0.99.0 for overlay 0.5.0"]
    assert tables(text) == []
    assert "\n\n\n" not in text


def test_hostile_text_makes_no_markup() -> None:
    review = reviews.hostile(reviews.review())
    text = markdown.render(review)
    patches, names, _ = tables(text)
    shown = " ".join(HOSTILE.split())
    for cell in patches[1]:
        assert cell.endswith(shown)
    assert {len(line) for line in (*patches, *names)} == {3, 4}
    children = [child for token in parsed(text) for child in token.children or []]
    ours = {"code_inline", "html_inline", "strong_open", "strong_close", "text"}
    assert {child.type for child in children} == ours
    assert {child.content for child in children if child.type == "html_inline"} == {"<!-- -->"}
    assert {token.type for token in parsed(text)}.isdisjoint({"html_block", "fence", "hr"})


def test_nobody_is_mentioned_and_no_other_thread_linked() -> None:
    review = reviews.review()
    review["warnings"] = ["@property became #12 of vllm-project/vllm#43450, @overload too"]
    text = markdown.render(review)
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


@pytest.mark.parametrize("number", [400, 20_000])
def test_it_fits_into_a_comment_and_counts_what_is_left_out(number: int) -> None:
    review = reviews.review()
    for key in ("names", "warnings", "patches", "targets"):
        review[key] = [review[key][0]] * number
    text = markdown.render(review)
    assert len(text) <= MOST
    left = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) more are in", text)]
    lines = sum(len(table) - 1 for table in tables(text)) + text.count("\n- ")
    assert sum(left) + lines == 4 * number
    # Each section shows something.
    assert len(tables(text)) == 3
    assert "\n- " in text


def test_a_single_text_cannot_fill_it() -> None:
    review = reviews.review()
    review["patches"][0]["because"] = "*" * 100_000
    text = markdown.render(review)
    assert len(text) < 10_000
    assert len(tables(text)[0]) == 1 + len(review["patches"])
