"""Diffs lose no line, and call only equal lines the same."""

from html import unescape

from hypothesis import example, given
from hypothesis import strategies as st
from review.highlighting import highlighted, html, visible
from review.text_diff import CONTEXT, Hunk, Row, Span, compare, lines_of

#: Few different lines, so that texts share many; some alike, some hostile.
LINES = st.sampled_from(["", "a = 1", "a = 2", "a = b(1)", "    b", "\tb", "</td>", "ü \r", "z"])
TEXT = st.lists(LINES, max_size=40)


def numbers(hunks: list[Hunk], side: str) -> list[int]:
    """The lines of a side, shown or left out, in their order."""
    indices: list[int] = []
    for hunk in hunks:
        indices += getattr(hunk, side)
        indices += (at for row in hunk.rows if (at := getattr(row, side)) is not None)
    return indices


@given(TEXT, TEXT)
def test_every_line_has_its_place_and_only_equal_ones_are_left_out(
    left: list[str], right: list[str]
) -> None:
    hunks = compare(left, right)
    assert numbers(hunks, "left") == list(range(len(left)))
    assert numbers(hunks, "right") == list(range(len(right)))
    for hunk in hunks:
        gone = ([left[i] for i in hunk.left], [right[j] for j in hunk.right])
        assert gone[0] == gone[1]
        for row in hunk.rows:
            one = None if row.left is None else left[row.left]
            other = None if row.right is None else right[row.right]
            assert (one == other) == (row.kind == "same")
            assert (one is None) == (row.kind == "new")
            assert (other is None) == (row.kind == "gone")


@given(TEXT, TEXT)
def test_lines_alike_are_equal_outside_their_spans(left: list[str], right: list[str]) -> None:
    for hunk in compare(left, right):
        for row in hunk.rows:
            if row.left_spans or row.right_spans:
                assert row.left is not None
                assert row.right is not None
                one, other = left[row.left], right[row.right]
                assert rest(one, row.left_spans) == rest(other, row.right_spans)


def rest(line: str, spans: tuple[Span, ...]) -> str:
    """The part of a line that no span covers."""
    for start, end in reversed(spans):
        assert 0 <= start < end <= len(line)
        line = line[:start] + line[end:]
    return line


def test_lines_around_a_change_are_shown_and_no_more() -> None:
    left = [f"line {at}" for at in range(30)]
    right = [*left[:15], "new", *left[15:]]
    first, last = compare(left, right)
    assert first.left == first.right == range(15 - CONTEXT)
    kinds = [row.kind for row in first.rows]
    assert kinds == ["same"] * CONTEXT + ["new"] + ["same"] * CONTEXT
    assert (last.left, last.right) == (range(15 + CONTEXT, 30), range(16 + CONTEXT, 31))
    assert last.rows == ()


def test_a_line_stands_beside_what_became_of_it() -> None:
    left = ["self.rows = []", "other(thing)"]
    right = ["self.live = Live(self)", "self.rows = self.live.rows", "unlike + 4"]
    (hunk,) = compare(left, right)
    assert hunk.rows == (
        Row("new", None, 0),
        Row("changed", 0, 1, (Span(12, 14),), (Span(12, 26),)),
        Row("changed", 1, 2),
    )


SOURCE = st.text(st.sampled_from("ab1 \n\t\r\f'\"#@\\(){}=\u00fc\u2028\u202e\x00"), max_size=60)


@given(SOURCE)
def test_colours_change_no_text(text: str) -> None:
    lines = highlighted(text)
    assert tuple("".join(part for _, part in line) for line in lines) == lines_of(text)


@example("x=None", 1, 5)
@given(SOURCE.filter(lambda text: "\n" not in text), st.integers(0, 50), st.integers(1, 9))
def test_emphasis_cuts_through_tokens(text: str, start: int, length: int) -> None:
    spans = [Span(start, start + length)] if start + length <= len(text) else []
    for line in highlighted(text):
        markup = html(line, spans)
        assert unescape(_without_colours(markup.replace("<mark>", "").replace("</mark>", ""))) == (
            visible(text)
        )
        marked = "".join(part.split("</mark>")[0] for part in markup.split("<mark>")[1:])
        wanted = "".join(text[a:b] for a, b in spans)
        assert html((("", wanted),)) == _without_colours(marked)


def _without_colours(markup: str) -> str:
    for kind in "csmkbdf":
        markup = markup.replace(f"<span class={kind}>", "")
    return markup.replace("</span>", "")


def test_python_has_its_colours() -> None:
    lines = highlighted('@wraps\ndef run(self):\n    """One\n    two."""\n    return 1  # why\n')
    kinds = [[kind for kind, text in line if kind] for line in lines]
    assert kinds == [["d"], ["k", "f", "b"], ["s"], ["s"], ["k", "m", "c"]]
    assert html(lines[1]) == (
        "<span class=k>def</span> <span class=f>run</span>(<span class=b>self</span>):"
    )


def test_invisible_characters_are_shown() -> None:
    assert visible("a\u202eb\u200bc\rd\x00\te") == "a<U+202E>b<U+200B>c␍d␀\te"
    assert html(highlighted("x\u2066y")[0]) == "x&lt;U+2066&gt;y"
