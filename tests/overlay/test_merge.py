"""A part of a series: what stays is byte for byte what it is in the whole."""

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay import merge
from overlay.errors import OverlayError
from overlay.patches import FilePatch, Hunk, Patch, Series, dumps, parse, split_lines
from support.sites import OVERLAY, UPSTREAM

PATH = "vllm/x.py"


def upstream(path: str) -> bytes:
    return (UPSTREAM / path).read_bytes()


def test_all_patches_are_the_series_itself() -> None:
    names = {patch.name for patch in OVERLAY.series.patches}
    whole = merge.part(OVERLAY.series, names, OVERLAY.targets, upstream)
    assert whole.patches == OVERLAY.series.patches


def edits(*steps: tuple[int, int, Sequence[bytes]], data: bytes) -> Series:
    """A series of one hunk each: the line that it begins at, how many it removes, its lines."""
    patches = []
    for number, (at, count, new) in enumerate(steps):
        lines = split_lines(data)
        hunk = Hunk(at, tuple(lines[at : at + count]), at, tuple(new))
        file = FilePatch(PATH, (hunk,))
        data = file.apply(data, "")
        patches.append(Patch("abcdefgh"[number], "", (file,)))
    return Series(patches)


def result(series: Series, kept: Collection[str], data: bytes) -> bytes:
    """The file with a part of a series, which can be taken off again and written down."""
    part = merge.part(series, kept, [PATH], lambda _: data)
    after = part.apply(PATH, data)
    assert part.reverse(PATH, after) == data
    for patch in part.patches:
        assert parse(patch.name, dumps(patch)).files == patch.files
    assert [patch.name for patch in part.patches] == sorted(kept)
    return after


FIVE = b"1\n2\n3\n4\n5\n"


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        pytest.param((1, 1, [b"a\n"]), (1, 0, [b"b\n"]), b"1\nb\n2\n3\n4\n5\n", id="above"),
        pytest.param((1, 1, [b"a\n"]), (2, 0, [b"b\n"]), b"1\n2\nb\n3\n4\n5\n", id="below"),
        pytest.param((0, 0, [b"a\n"]), (0, 0, [b"b\n"]), b"b\n" + FIVE, id="at the top"),
        pytest.param((5, 0, [b"a\n"]), (6, 0, [b"b\n"]), FIVE + b"b\n", id="at the end"),
        pytest.param((0, 2, []), (2, 1, []), b"1\n2\n3\n4\n", id="further down"),
    ],
)
def test_lines_stay_with_their_neighbours(
    first: tuple[int, int, Sequence[bytes]],
    second: tuple[int, int, Sequence[bytes]],
    expected: bytes,
) -> None:
    assert result(edits(first, second, data=FIVE), {"b"}, FIVE) == expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((1, 0, [b"a\n", b"c\n"]), (2, 0, [b"b\n"]), id="between its lines"),
        pytest.param((1, 0, [b"a\n"]), (1, 1, [b"b\n"]), id="its line is replaced"),
        pytest.param((1, 1, [b"a\n"]), (0, 3, []), id="its lines and others are removed"),
        pytest.param((1, 2, []), (1, 0, [b"b\n"]), id="where it removed lines"),
        pytest.param((2, 1, []), (1, 2, [b"b\n"]), id="around a line that it removed"),
    ],
)
def test_what_needs_the_lines_of_another_is_refused(
    first: tuple[int, int, Sequence[bytes]], second: tuple[int, int, Sequence[bytes]]
) -> None:
    series = edits(first, second, data=FIVE)
    assert result(series, {"a", "b"}, FIVE) == series.apply(PATH, FIVE)
    result(series, {"a"}, FIVE)
    with pytest.raises(OverlayError, match=f"{PATH}: b changes lines of a patch that is left out"):
        result(series, {"b"}, FIVE)


@settings(max_examples=300)
@given(data=st.data())
def test_any_part_of_any_series_can_be_taken_off(data: st.DataObject) -> None:
    """Each line that is brought is there if its patch is; each that none removes stays."""
    text = FIVE
    steps = []
    for name in "abcde":
        lines = split_lines(text)
        at = data.draw(st.integers(0, len(lines)))
        count = data.draw(st.integers(0, min(2, len(lines) - at)))
        brought = data.draw(st.integers(0 if count else 1, 2))
        new = [f"{name}{number}\n".encode() for number in range(brought)]
        steps.append((at, count, new))
        text = b"".join([*lines[:at], *new, *lines[at + count :]])
    series = edits(*steps, data=FIVE)
    kept = data.draw(st.sets(st.sampled_from("abcde")))
    removed = {
        line: patch.name
        for patch in series.patches
        for file in patch.files
        for hunk in file.hunks
        for line in hunk.old
    }
    try:
        after = split_lines(result(series, kept, FIVE))
    except OverlayError:
        assert kept != set("abcde")
        return
    brought_by = {
        line: name for name, (_, _, new) in zip("abcde", steps, strict=True) for line in new
    }
    expected = {*split_lines(FIVE), *(line for line, name in brought_by.items() if name in kept)}
    assert {*after} == {line for line in expected if removed.get(line) not in kept}
    assert len(after) == len({*after})
    theirs = [line for line in after if line in split_lines(FIVE)]
    assert theirs == sorted(theirs)
