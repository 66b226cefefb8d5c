"""The Markdown of a review, as a reader of Markdown understands it."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from review import markdown, page, pieces
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


def test_a_description_is_told_from_its_first_line() -> None:
    """In a header only a line's end stands between the two."""
    (patch, *_) = reviews.review()["patches"]
    title = patch["title"]
    text = markdown.document(reviews.review(), reviews.texts())
    assert f"- Description: {title}. and more of it." in text
    for first, shown in (
        ("Ends. \nMore", "Ends. More"),
        ("Alone", "Alone"),
        ("Why?\nSo", "Why? So"),
    ):
        assert markdown.described(first) == shown


def test_the_report_has_every_verdict_and_the_names_that_changed() -> None:
    review = reviews.review()
    text = markdown.report(review)
    assert headings(text) == [
        "vLLM 0.99.0 for overlay 0.5.0",
        "1 conflict",
        "6 warnings",
        "Features and fixes: 0 of 2 hold as they are",
        "Classes that run: 1 change of 2 facts",
        "Fixes: 1 of 3 can go",
        "Names that changed: 3 of 5 names that the overlay uses",
        "What we re-implement: 1 changed",
        "Callees: 1 changed",
        "Other changes in the files that we patch: 1",
        "Upstream's own drift",
    ]
    patches, words, classes, fixes, names, mirrors, callees, patched, drift = tables(text)
    assert patches == [
        ["patch", "verdict", "why"],
        *([each["name"], each["verdict"], each["because"]] for each in review["patches"]),
    ]
    assert words[1:] == [
        [word["name"], "fixes", f"{word['verdict']}; dead on OneForCausalLM", "; ".join(reasons)]
        for word in review["words"]
        if (reasons := [*word["conflicts"], *word["because"]])
    ]
    assert [row[2] for row in classes[1:]] == [review["classes"][0]["detail"]]
    assert all(f"- {pieces.escape(sentence)}\n" in text for sentence in review["summary"])
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
        "0.22.0: vllm/one.py:5, 0.99.0: vllm/one.py:9",
        "0.22.0: vllm/two.py:5, 0.99.0: vllm/two.py:5",
        "0.22.0: vllm/one.py:5",
    ]
    assert names[1][4] == "called, holds a seam by vllm/v1/b.py:2"
    users = [f"vllm/v1/readiness/user_{at}.py:{at}" for at in range(5)]
    assert names[2][4].endswith(f" by {', '.join(users[:3])}, and 2 more")
    assert all(pieces.escape(user) in markdown.document(review, {}) for user in users)
    for key, rows in (("mirrors", mirrors), ("callees", callees), ("patched", patched)):
        found = [each for each in review[key] if each.get("counts", True)]
        assert [row[0] for row in rows[1:]] == [each["what"] for each in found]
    assert drift[1:] == [
        ["vllm/one.py", "12", "8", "1"],
        ["vllm/two.py", "1,325", "1,543", "2"],
        ["vllm/three.py", "0", "0", "0"],
    ]
    counts = "1 patch applies as it is, 1 patch applies moved, 1 patch conflicts, 1 patch is obs"
    for phrase in (counts, "**conflicts**", review["release"]["sha256"], f"`{review['command']}`"):
        assert phrase in text
    for warning in review["warnings"]:
        assert f"- {pieces.escape(warning)}\n" in text


def test_the_report_has_the_text_of_a_conflict_as_git_writes_it() -> None:
    review = reviews.review()
    text = markdown.report(review)
    (fence,) = (token for token in parsed(text) if token.type == "fence")
    assert fence.content.split("\n") == [
        "above = 1",
        "<<<<<<< 0.99.0",
        *["kept", "their_line = 1", "", "their_other_line = 2"],
        "||||||| 0.22.0",
        *["kept", "base_line = 1"],
        "=======",
        *["kept", "our_line = 1"],
        ">>>>>>> 0004-fight.patch",
        "below = 1",
        "",
    ]
    hunk = review["patches"][2]["files"][0]["hunks"][0]
    hunk["theirs"] = [f"line_{number}" for number in range(100)]
    assert "… 70 more lines\n||||||| 0.22.0" in markdown.report(review)


def test_places_lead_to_upstreams_files_at_both_tags() -> None:
    review = reviews.review()
    upstream = "https://github.com/vllm-project/vllm/blob"
    links = set(re.findall(rf"\[`([^`]+)`\]\(({upstream}[^)]+)\)", markdown.report(review)))
    for version, place in (
        ("0.22.0", "vllm/one.py:5"),
        ("0.99.0", "vllm/one.py:9"),
        ("0.99.0", "vllm/two.py:24"),  # the conflict
        ("0.99.0", "vllm/three.py:7"),
    ):
        path, line = place.split(":")
        assert (place, f"{upstream}/v{version}/{path}#L{line}") in links
    # There is no tag for what somebody has built.
    review["release"]["version"] = "0.99.0+ours"
    assert "blob/v0.99.0" not in markdown.report(review)


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
        "- VERSION_PIN: not written until what is wrong is resolved\n\n"
        "Made by `make review RELEASE=0.99.0` on 2026-11-22.\n"
    )


def test_a_review_of_nothing_is_short() -> None:
    keys = ("patches", "fixes", "targets", "names", "warnings", "words", "classes", "summary")
    empty: dict[str, Any] = {key: [] for key in (*keys, "mirrors", "callees", "patched")}
    review = {**reviews.review(), **empty, "candidate": None}
    for text in (markdown.report(review), markdown.document(review, {})):
        assert headings(text) == ["vLLM 0.99.0 for overlay 0.5.0"]
        assert tables(text) == []
        assert "There are no patches." in text


def test_hostile_text_makes_no_markup() -> None:
    review = reviews.hostile(reviews.review())
    review["patches"][2]["verdict"] = "conflicts"
    text = markdown.report(review)
    patches, _, _, fixes, names, *_ = tables(text)
    shown = " ".join(HOSTILE.split())
    for cell in patches[1]:
        assert cell.endswith(shown)
    assert {len(line) for line in (*patches, *fixes, *names)} == {3, 5}
    children = [child for token in parsed(text) for child in token.children or []]
    ours = {"code_inline", "html_inline", "strong_open", "strong_close", "text"}
    assert {child.type for child in children} == ours
    assert {child.content for child in children if child.type == "html_inline"} == {"<!-- -->"}
    assert {token.type for token in parsed(text)}.isdisjoint({"html_block", "hr"})
    assert sum(token.type == "fence" for token in parsed(text)) == 1  # the conflict


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
    for rendered in (pieces.escape(text), f"- {pieces.escape(text)}"):
        blocks = [token for token in parsed(rendered) if token.type == "inline"]
        assert "".join(shown_text(block) for block in blocks) == one_line
        assert len(blocks) == (1 if one_line else 0)
    row = f"| a | b |\n| --- | --- |\n| {pieces.escape(text)} | {pieces.code(text, True)} |"
    ((_, cells),) = tables(row)
    assert cells == [one_line, one_line or " "]
    assert [shown_text(token) for token in parsed(f"x{pieces.code(text)}") if token.children] == [
        f"x{one_line or ' '}"
    ]


@pytest.mark.parametrize("number", [400, 4_000])
def test_it_fits_into_a_comment_and_counts_what_is_left_out(number: int) -> None:
    review = reviews.review()
    for key in ("names", "warnings", "patches", "fixes", "targets"):
        review[key] = [review[key][0]] * number
    keys = ("words", "classes", "summary", "mirrors", "callees", "patched")
    review |= {key: [] for key in keys}
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
    (token, *_) = parsed(pieces.diff(("old", left), ("new", right), context=context))
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
    text = pieces.diff(("old", left), ("new", right), numbered=False)
    assert "-self.rows = list(rows)\n+self.rows = tuple(rows)\n" in text


def test_invisible_characters_are_shown() -> None:
    text = page.visible("a\u202eb\u200bc\rd\x00\te\u2066")
    assert text == "a<U+202E>b<U+200B>c␍d␀\te<U+2066>"
