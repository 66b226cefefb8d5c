"""Which ratios are called a difference: few rounds, noise and disturbed rounds are none."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from bench.compare.intervals import LEAST, LEVEL, quantile
from bench.compare.summary import AGAIN, STOCK, CaseResult, Child, summarise
from bench.reports.claims import CLAIMED, DISTURBED, FEW, MARKS, NOISE, Claims, paired
from bench.reports.markdown import markdown
from support import runs

SIDES = (STOCK, "overlaid")
FIGURES = [f"{part} {point}" for part in "abcdefgh" for point in ("p50", "p99")]
CASES = ("plain", "penalties", "logprobs", "bad words")
#: A round's noise of each side: factors by case and figure.
Noise = Callable[[random.Random, str], Iterator[float]]


def measured(
    side: str, turn: int, values: Iterator[float], disturbance: dict[str, float] | None = None
) -> Child:
    cases = {
        case: CaseResult({figure: next(values) for figure in FIGURES}, {}, disturbance=disturbance)
        for case in CASES
    }
    return Child(side, turn, cases)


def run_of(children: Sequence[Child], sides: Sequence[str] = SIDES) -> dict[str, Any]:
    row = summarise(dict.fromkeys(CASES), sides, children)
    about = {"title": "Made up.", "shape": "small", "output": 8}
    return {**runs.head("engine"), "complete": True, "errors": [], "rows": {"row": about | row}}


def called(run: dict[str, Any], side: str = "overlaid") -> int:
    """The ratios that are called a difference."""
    claims = Claims([run])
    cases = run["rows"]["row"]["cases"].values()
    return sum(claims.better(case, each, side) is not None for case in cases for each in FIGURES)


def quiet(chance: random.Random, _: str) -> Iterator[float]:
    while True:
        yield 2.718 ** chance.gauss(0, 0.02)


def machine(chance: random.Random, _: str) -> Iterator[float]:
    """A machine whose speed in a child is one of three."""
    speed = chance.choice((1.0, 1.1, 1.6))
    while True:
        yield speed * 2.718 ** chance.gauss(0, 0.02)


def stalls(chance: random.Random, _: str) -> Iterator[float]:
    """Now and then a figure is many times as large."""
    while True:
        yield 2.718 ** (chance.gauss(0, 0.02) + (chance.random() < 0.1) * chance.expovariate(1))


@pytest.mark.parametrize("noise", [quiet, machine, stalls])
@pytest.mark.parametrize("count", [LEAST, 8])
def test_identical_sides_are_told_apart_no_oftener_than_promised(noise: Noise, count: int) -> None:
    """Of 200 runs of 64 ratios, 10 may hold a false claim; more than 20 once in 500 times."""
    chance = random.Random(7)
    wrong = 0
    for _ in range(200):
        run = run_of(
            [
                measured(side, turn, noise(chance, side))
                for turn in range(1, count + 1)
                for side in SIDES
            ]
        )
        assert Claims([run]).count == len(CASES) * len(FIGURES)
        wrong += called(run) > 0
    assert wrong <= 2 * LEVEL * 200


def test_a_difference_beyond_the_noise_is_called_one() -> None:
    chance = random.Random(1)

    def faster(side: str) -> Iterator[float]:
        values = quiet(chance, side)
        return values if side == STOCK else (value / 3.8 for value in values)

    children = [measured(side, turn, faster(side)) for turn in range(1, 6) for side in SIDES]
    assert called(run_of(children)) == len(CASES) * len(FIGURES)
    for count in (1, 2, 3, 4):
        few = run_of(children[: 2 * count])
        assert called(few) == 0
        claims = Claims([few])
        case = few["rows"]["row"]["cases"]["plain"]
        assert claims.mark(case, "a p50", "overlaid") == FEW
        text = markdown(few)
        assert MARKS[FEW] in text
        assert "**0." not in text


def figure(stock: Sequence[float | None], ours: Sequence[float | None]) -> dict[str, Any]:
    case = runs.case(SIDES, 1.0)
    values = case["figures"]["ITL p50"]
    values["rounds"] = {STOCK: list(stock), "overlaid": list(ours)}
    return case


SLOW, FAST = [2.0, 2.1, 1.9, 2.0, 2.05], [1.0, 1.05, 0.95, 1.0, 1.02]


@pytest.mark.parametrize(
    ("stock", "ours", "ratio", "mark"),
    [
        (SLOW, FAST, 0.5, ""),
        (SLOW, FAST, 1.1, NOISE),  # the medians say otherwise
        (SLOW[:4], FAST[:4], 0.5, FEW),
        ([*SLOW[:4], None], FAST, 0.5, FEW),
        (SLOW, [2.0, 1.9, 2.1, 2.02, 2.0], 0.99, NOISE),
        ([], FAST, 0.5, FEW),
    ],
)
def test_the_mark_of_a_ratio(
    stock: Sequence[float | None], ours: Sequence[float | None], ratio: float, mark: str
) -> None:
    case = figure(stock, ours)
    case["figures"]["ITL p50"]["ratios"]["overlaid"] = ratio
    assert Claims([]).mark(case, "ITL p50", "overlaid") == mark


def test_rounds_are_paired_by_their_number() -> None:
    case = figure([2.0, None, 4.0, 0.0], [1.0, 3.0, 1.0, 1.0])
    assert paired(case, "ITL p50", "overlaid") == [0.5, 0.25]


def test_a_disturbed_round_is_named_and_makes_no_claim() -> None:
    """Another process on one side's cores slows that side alone, in every round."""
    chance = random.Random(3)
    loaded = {"run delay": 0.4, "steal": 0.0}
    children = []
    for turn in range(1, 6):
        slower = (value * 2 for value in quiet(chance, ""))
        children += [
            measured(STOCK, turn, quiet(chance, ""), {"run delay": 0.001, "steal": 0.0}),
            measured("overlaid", turn, slower, loaded if turn == 5 else None),
        ]
    run = run_of(children)
    assert called(run) == 0
    claims, case = Claims([run]), run["rows"]["row"]["cases"]["plain"]
    assert claims.mark(case, "a p50", "overlaid") == DISTURBED
    text = markdown(run)
    assert "- plain was disturbed: overlaid round 5: run delay 40.0%." in text
    assert MARKS[DISTURBED] in text
    more = [measured(side, 6, quiet(chance, "")) for side in SIDES]
    for child in more[1:]:
        for one in child.cases.values():
            one.figures = {name: (value or 0) * 2 for name, value in one.figures.items()}
    assert called(run_of([*children, *more])) == len(CASES) * len(FIGURES)


def test_bold_is_better_and_italics_are_worse() -> None:
    chance = random.Random(2)
    children = [
        Child(side, turn, {"plain": CaseResult({"tokens/s": speed, "ITL p50": 1 / speed}, {})})
        for turn in range(1, 6)
        for side, speed in ((STOCK, 100 + chance.random()), ("overlaid", 50 + chance.random()))
    ]
    row = summarise({"plain": {}}, SIDES, children)
    run = run_of([]) | {"rows": {"row": {"title": "", "shape": "small", "output": 8, **row}}}
    text = markdown(run)
    assert "| plain | tokens/s | 100" in text
    assert text.count(" *0.50") == 2  # tokens/s, and those of the fastest round
    assert text.count(" *1.9") == 1
    assert " **0.50" not in text.partition("| ")[2]
    assert CLAIMED.format(claims=3) in text
    for values in row["cases"]["plain"]["figures"].values():
        for rounds in values["rounds"].values():
            rounds.reverse()
        swapped = values["rounds"]
        values["rounds"] = {STOCK: swapped["overlaid"], "overlaid": swapped[STOCK]}
        values["ratios"] = {"overlaid": 1 / values["ratios"]["overlaid"]}
    assert markdown(run).count("**0.50") == 1


def test_stock_beside_itself_is_the_noise_floor() -> None:
    chance = random.Random(4)
    sides = (STOCK, AGAIN)
    children = [measured(side, turn, quiet(chance, "")) for turn in range(1, 6) for side in sides]
    run = run_of(children, sides)
    text = markdown(run)
    assert "stock again / stock" in text
    assert "Noise floor, stock beside itself: of 64 ratios half are within " in text
    assert "; 0 would be called a difference." in text
    assert "Noise floor" not in markdown(runs.engine())


def test_more_claims_need_more() -> None:
    assert quantile(4, 0.05) == pytest.approx(2.7764, abs=1e-3)
    assert quantile(9, 0.001) == pytest.approx(4.7809, abs=1e-3)
    assert quantile(4, 0.05 / 130) > 10
