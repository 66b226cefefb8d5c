"""Which ratios of a page differ from 1, and the marks of those that cannot be told from noise."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from bench.compare.disturbance import LIMIT, reasons
from bench.compare.intervals import LEAST, LEVEL, Interval, interval
from bench.compare.summary import AGAIN
from bench.reports import figures
from bench.reports.figures import others, ratio
from bench.reports.run_file import Json

#: The mark of a ratio whose interval includes 1; of one of too few rounds; of one that has too few
#: undisturbed ones.
NOISE, FEW, DISTURBED = "~", "?", "!"
MARKS = {
    NOISE: f"{NOISE} marks a ratio whose interval over the rounds includes 1: no difference shown.",
    FEW: f"{FEW} marks a ratio of fewer than {LEAST} rounds: not enough rounds for a claim.",
    DISTURBED: f"{DISTURBED} marks a ratio of which fewer than {LEAST} rounds were undisturbed "
    f"(run delay and steal of at most {LIMIT:.0%} on both sides): no claim.",
}
CLAIMED = (
    "Ratios in **bold** are better than stock's, those in *italics* worse. The chance that any of "
    f"a page's {{claims}} ratios is called so where the sides are equal is {LEVEL:.0%}."
)
#: Figures of which more is better end so.
_RATE = "/s"
#: Of a figure that grows by design: the wait that leaves ``sample_tokens`` is spent there.
_BY_DESIGN = "get_output"


def marked(value: float, found: Interval | None, equal: float = 1.0) -> Any:
    """Return a table's cell: a value, with its mark if the rounds do not tell the sides apart.

    Args:
        value: a ratio or a difference.
        found: its interval; None of too few rounds.
        equal: what it is where the sides are equal.
    """
    if found is None:
        return [value, FEW]
    return value if _differs(value, found, equal) else [value, NOISE]


def _differs(value: float, found: Interval, equal: float = 1.0) -> bool:
    """Return whether the rounds tell the sides apart, and say the same as what is shown.

    The ratio of the medians may lie on the other side of 1 than the mean of the ratios.
    """
    agree = (value > equal) == (found.ratio > equal) and value != equal
    return found.excludes(equal) and agree


class Claims:
    """The ratios that stand on one page; their intervals are corrected for their number.

    Args:
        runs: of the page.
        shown: figures that are shown; None for all.

    Attributes:
        count: ratios that have enough rounds for a claim.
    """

    def __init__(self, runs: Iterable[Json], shown: Container[str] | None = None) -> None:
        self.count = 0
        for run in runs:
            rows: Mapping[str, Json] = run["rows"] if run["kind"] == "engine" else {}
            for row in rows.values():
                for case in row["cases"].values():
                    self.count += sum(
                        ratio(case, figure, side) is not None
                        and len(paired(case, figure, side)) >= LEAST
                        for figure in case["figures"]
                        if (shown is None or figure in shown) and decides(figure)
                        for side in others(row["sides"])
                    )

    def interval(self, case: Json, figure: str, side: str) -> Interval | None:
        """Return the interval of a ratio over its undisturbed rounds; None of too few."""
        return interval([[one] for one in paired(case, figure, side)], self.count)

    def mark(self, case: Json, figure: str, side: str) -> str:
        """Return the mark of a ratio; empty if the rounds tell the side from stock."""
        if len(paired(case, figure, side, disturbed=True)) < LEAST:
            return FEW
        found = self.interval(case, figure, side)
        if found is None:
            return DISTURBED
        return "" if _differs(ratio(case, figure, side) or 1.0, found) else NOISE

    def better(self, case: Json, figure: str, side: str) -> bool | None:
        """Return whether a side is better than stock; None where that cannot be told."""
        value = ratio(case, figure, side)
        if value is None or not decides(figure) or self.mark(case, figure, side):
            return None
        return (value > 1) == more_is_better(figure)

    def floor(self, row: Json) -> str | None:
        """Return what stock beside itself says of a row's noise; None if that was not measured."""
        if AGAIN not in row["sides"]:
            return None
        seen = [
            (max(value, 1 / value) - 1, self.mark(case, figure, AGAIN))
            for case in row["cases"].values()
            for figure in case["figures"]
            if (value := ratio(case, figure, AGAIN))
        ]
        if not seen:
            return "Noise floor: stock beside itself has no ratios."
        sizes = sorted(size for size, _ in seen)
        half, nine = (sizes[int((len(sizes) - 1) * part)] for part in (0.5, 0.9))
        claims = sum(not mark for _, mark in seen)
        return (
            f"Noise floor, stock beside itself: of {len(sizes)} ratios half are within {half:.1%} "
            f"of 1, nine in ten within {nine:.1%}, all within {sizes[-1]:.1%}; {claims} would be "
            "called a difference."
        )


def decides(figure: str) -> bool:
    """Return whether a figure can be better or worse than stock's."""
    return not figure.startswith(_BY_DESIGN)


def more_is_better(figure: str) -> bool:
    """Return whether a larger value of a figure is better."""
    return figure.partition(",")[0].endswith(_RATE)


def paired(case: Json, figure: str, side: str, disturbed: bool = False) -> list[float]:
    """Return a figure's ratio to stock in each round that both sides have.

    Args:
        case: of a row.
        figure: its name.
        side: that is compared with stock.
        disturbed: whether rounds count in which a side was disturbed.
    """
    rounds = case["figures"][figure]["rounds"]
    both = zip(rounds.get(side, ()), rounds.get("stock", ()), strict=False)
    return [
        one / stock
        for number, (one, stock) in enumerate(both)
        if one and stock and (disturbed or not figures.disturbed(case, number, side))
    ]


def disturbances(row: Json) -> Iterator[str]:
    """Yield a line for each case that was disturbed: the sides, their rounds, and the worst."""
    for label, case in row["cases"].items():
        texts = []
        for side, rounds in case.get("disturbances", {}).items():
            pairs = zip(row["compared"], rounds, strict=False)
            bad = [(number, one) for number, one in pairs if reasons(one)]
            if bad:
                _, worst = max(bad, key=lambda pair: pair[1].get("run delay") or 0)
                numbers = ", ".join(str(number) for number, _ in bad)
                of = f"round {numbers}: " if len(bad) == 1 else f"rounds {numbers}: at most "
                texts.append(f"{side} {of}{', '.join(reasons(worst))}")
        if texts:
            yield f"- {label} was disturbed: {'; '.join(texts)}."
