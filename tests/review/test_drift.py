"""Upstream's changes to a file, and the lines that are ours."""

import pytest
from review.drift import changed_lines, drift

OLD = b"""\
def kept():
    return 1


class Runner:
    def changed(self):
        return 1

    def gone(self):
        return 2
"""
NEW = b"""\
def kept():
    return 1


class Runner:
    def changed(self):
        return 10

    def new(self):
        return 3

    class Inner:
        def new(self):
            return 4
"""


def test_functions_are_told_apart() -> None:
    changes = drift(OLD, NEW)
    assert changes.functions == (
        ("Runner.changed", "changed"),
        ("Runner.gone", "gone"),
        ("Runner.new", "new"),
        ("Runner.Inner.new", "new"),
    )
    assert (changes.added, changes.removed) == (7, 3)


def test_equal_files_have_no_drift() -> None:
    changes = drift(OLD, OLD)
    assert (changes.added, changes.removed, changes.functions) == (0, 0, ())


def test_lines_of_an_unparsable_module_are_counted() -> None:
    changes = drift(OLD, b"def broken(:\n")
    assert (changes.added, changes.removed) == (1, 10)


@pytest.mark.parametrize(
    ("after", "spans"),
    [
        (b"a\nb\nc\nd\n", []),
        (b"x\na\nb\nc\nd\n", [(1, 2)]),
        (b"a\nc\nd\n", [(2, 2)]),
        (b"b\nc\nd\n", [(1, 1)]),
        (b"a\nb\nx\ny\nd\ne\n", [(3, 5), (6, 7)]),
        (b"a\n b\nc\nd\n", [(2, 3)]),
    ],
)
def test_changed_lines_are_those_of_the_text_afterwards(
    after: bytes, spans: list[tuple[int, int]]
) -> None:
    ranges = changed_lines(b"a\nb\nc\nd\n", after)
    # Empty ranges are equal wherever they are.
    assert [(each.start, each.stop) for each in ranges] == spans
