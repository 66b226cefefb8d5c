"""Texts side by side: nothing is lost, and what is said to be the same is."""

from html import unescape

from hypothesis import example, given
from hypothesis import strategies as st
from review.highlighting import highlighted, html, visible
from review.text_diff import CONTEXT, Row, Span, TextDiff, compare, lines_of

#: Few different lines, so that texts share many; some alike, some hostile.
LINES = st.sampled_from(["", "a = 1", "a = 2", "a = b(1)", "    b", "\tb", "</td>", "ü \r", "z"])
TEXT = st.lists(LINES, max_size=40)


def numbers(diff: TextDiff, side: str) -> list[int]:
    """The lines of a side in the order that they are shown or left out in."""
    found: list[int] = []
    for hunk in diff.hunks:
        found += getattr(hunk, side)
        found += (at for row in hunk.rows if (at := getattr(row, side)) is not None)
    return found


@given(TEXT, TEXT)
def test_every_line_has_its_place_and_only_equal_ones_are_left_out(
    left: list[str], right: list[str]
) -> None:
    diff = compare(left, right)
    assert numbers(diff, "left") == list(range(len(left)))
    assert numbers(diff, "right") == list(range(len(right)))
    assert diff.same == (left == right)
    for hunk in diff.hunks:
        gone = ([left[i] for i in hunk.left], [right[j] for j in hunk.right])
        assert gone[0] == gone[1]
        for row in hunk.rows:
            one = None if row.left is None else left[row.left]
            other = None if row.right is None else right[row.right]
            assert (one == other) == (row.kind == "same")
            assert (one is None) == (row.kind == "new")
            assert (other is None) == (row.kind == "gone")


@given(TEXT, TEXT)
def test_without_what_is_emphasised_lines_alike_are_equal(
    left: list[str], right: list[str]
) -> None:
    for hunk in compare(left, right).hunks:
        for row in hunk.rows:
            if row.left_spans or row.right_spans:
                assert row.left is not None
                assert row.right is not None
                one, other = left[row.left], right[row.right]
                assert rest(one, row.left_spans) == rest(other, row.right_spans)


def rest(line: str, spans: tuple[Span, ...]) -> str:
    """What of a line no span covers."""
    for start, end in reversed(spans):
        assert 0 <= start < end <= len(line)
        line = line[:start] + line[end:]
    return line


def test_lines_around_a_change_are_shown_and_no_more() -> None:
    left = [f"line {at}" for at in range(30)]
    right = [*left[:15], "new", *left[15:]]
    first, last = compare(left, right).hunks
    assert first.left == first.right == range(15 - CONTEXT)
    kinds = [row.kind for row in first.rows]
    assert kinds == ["same"] * CONTEXT + ["new"] + ["same"] * CONTEXT
    assert (last.left, last.right) == (range(15 + CONTEXT, 30), range(16 + CONTEXT, 31))
    assert last.rows == ()


def test_a_line_stands_beside_what_became_of_it() -> None:
    left = ["self.rows = []", "other(thing)"]
    right = ["self.live = Live(self)", "self.rows = self.live.rows", "unlike + 4"]
    (hunk,) = compare(left, right).hunks
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


def _without_colours(made: str) -> str:
    for kind in "csmkbdf":
        made = made.replace(f"<span class={kind}>", "")
    return made.replace("</span>", "")


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
