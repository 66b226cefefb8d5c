"""The benchmark of readback: which steps are held against which, and what spoils that."""

import pytest
from bench import measure
from bench.measure import Step
from bench.readback import Foreign
from bench.rows import ROWS


def steps(waits: list[tuple[float, bool]]) -> list[Step]:
    """Steps of 10 ms and their waits, in ms."""
    return [
        Step(start=number / 100, beside=beside, waiting=wait / 1e3, events=wait / 2e3)
        for number, (wait, beside) in enumerate(waits)
    ]


def test_steps_beside_a_copy_are_held_against_quiet_ones() -> None:
    seen = steps([(4.0, False), (6.0, True), (4.0, False), (6.0, True), (9.0, True), (0, False)])
    figures = measure.beside(seen, [250.0, 240.0])
    assert figures["steps begun beside the copy"] == 3
    assert figures["copy, shortest"] == 240.0
    assert figures["wait of a step, quiet, p50"] == pytest.approx(4.0)
    assert figures["wait of a step, beside the copy, p50"] == pytest.approx(6.0)
    assert figures["wait of a step, beside / quiet, max"] == pytest.approx(9 / 4)
    assert figures["event waits of a step, beside / quiet, p50"] == pytest.approx(1.5)
    assert figures["step, beside / quiet, p50"] == pytest.approx(1.0)


def test_without_steps_beside_a_copy_there_is_no_ratio() -> None:
    figures = measure.beside(steps([(4.0, False)] * 9), [])
    assert figures["wait of a step, beside / quiet, p50"] is None
    assert figures["copy, shortest"] is None


@pytest.mark.parametrize(
    ("noisy", "length", "problems"),
    [(20, 250.0, 0), (2, 250.0, 1), (39, 250.0, 1), (20, Foreign.LEAST * 999, 1), (1, 9.0, 2)],
)
def test_few_steps_or_a_short_copy_spoil_the_case(noisy: int, length: float, problems: int) -> None:
    seen = steps([(4.0, number < noisy) for number in range(40)])
    assert len(measure._unlike(seen, [250.0, length])) == problems


def test_a_case_beside_copies_must_give_what_it_gives_alone() -> None:
    alone = {"sha256": {"tokens": "a", "logprobs": "b"}}
    assert measure._parted(alone, alone, "logprobs 5") == []
    other = {"sha256": {"tokens": "a", "logprobs": "c"}}
    assert measure._parted(other, alone, "logprobs 5") == [
        "logprobs differ from those of 'logprobs 5'"
    ]


@pytest.mark.parametrize("name", ROWS)
def test_each_case_beside_copies_has_one_without(name: str) -> None:
    row = ROWS[name]
    for case, direction in row.beside.items():
        assert direction in ("d2h", "h2d")
        assert row.alone(case) not in row.beside
        assert row.cases[row.alone(case)] == row.cases[case]
