"""Definitions are compared in reasonable time, however long or deep they are."""

import time
from collections.abc import Mapping

import pytest
from overlay.errors import OverlayError
from review.changes import change
from review.definitions import Definitions
from review.drift import drift
from review.pieces import diff
from review.trees import shape, unified
from support.series import upstream

PATH = "vllm/a.py"
#: Seconds; by pairs of equal lines it would take minutes.
PATIENCE = 20
ALIKE = "    x = 1\n" * 20_000
LONG = f"def f():\n{ALIKE}"
CHANGES: Mapping[str, tuple[str, str]] = {
    "every second line is new": (
        LONG.replace("x = 1\n", "x = 1\n    y = 2\n"),
        "0 of 20000 are gone, 20000",
    ),
    "the last line is new": (f"{LONG}    z = 1\n", "0 of 20000 are gone, 1"),
    "lines at both ends": (
        f"def f():\n    z = 1\n{ALIKE[:-10]}    w = 1\n",
        "1 of 20000 are gone, 2",
    ),
}


def compared(old: str, new: str) -> str:
    before, after = (Definitions(upstream({PATH: text})) for text in (old, new))
    return change(before, after, "vllm.a", "f").detail


@pytest.mark.parametrize(("text", "counts"), CHANGES.values(), ids=CHANGES)
def test_thousands_of_equal_lines(text: str, counts: str) -> None:
    began = time.perf_counter()
    assert compared(LONG, text) == f"Statements: {counts} are new."
    assert unified(LONG.encode(), text.encode()).startswith("@@")
    assert drift(LONG.encode(), text.encode()).functions == (("f", "changed"),)
    assert diff(("old", LONG.split("\n")), ("new", text.split("\n")), context=3)
    assert time.perf_counter() - began < PATIENCE


def test_an_order_is_a_change() -> None:
    assert compared("def f():\n    a()\n    b()\n", "def f():\n    b()\n    a()\n") == (
        "Statements: 1 of 2 are gone, 1 are new."
    )


def chained(first: str, operands: int) -> str:
    return f"def f():\n    return {first} + {' + '.join(['1'] * (operands - 1))}\n"


def test_an_expression_too_deep_to_be_written_again_is_compared() -> None:
    assert compared(chained("0", 1500), chained("0", 1500)) == ""
    assert compared(chained("0", 1500), chained("2", 1500)) == (
        "Statements: 1 of 1 are gone, 1 are new."
    )


def test_an_expression_too_deep_to_be_parsed_is_refused() -> None:
    deep = chained("0", 60_000)
    with pytest.raises(OverlayError, match=r"vllm/a\.py: cannot be parsed"):
        compared(deep, deep)
    assert drift(deep.encode(), deep.encode()).functions == ()


def test_shapes_tell_numbers_of_different_types_apart() -> None:
    ones = [
        shape(*Definitions(upstream({PATH: f"x = {one}\n"})).module("vllm.a").tree.body)  # type: ignore[union-attr]
        for one in ("1", "1.0", "True", "'1'", "b'1'", "0x1", "(1)")
    ]
    assert len(set(ones)) == 5
    assert ones[0] == ones[5] == ones[6]
