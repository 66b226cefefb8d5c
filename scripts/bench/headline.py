"""README's table to decide by, made of the committed runs.

A row is what requests ask for, and a column a place: the model, the requests at a time, and what is
compared with. A cell is the ratio of tokens/s with its interval where it is a claim, and the ratio
is bold where the interval is also narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bench.markdown import pipes
from bench.run import Comparison, Group

#: Row of the table to the name of its requests.
ROWS: Mapping[str, str] = {
    "nothing special: temperature 1": "plain",
    "a penalty": "presence",
    "a penalty, one of 128": "one-presence",
    "bad words": "bad-words",
    "a thinking budget": "thinking",
    "a penalty and a thinking budget": "thinking-presence",
    "mixed: penalties, top-p, seeds, logprobs": "mixed",
    "a seed each": "seeded",
    "5 logprobs": "logprobs",
    "JSON or another grammar, in a tenth": "grammars",
}
CORNER = "requests with"
#: The upper bound of a narrow interval over its lower bound, at most.
NARROW = 3.0
NO_GAIN, NOT_MEASURED, REFUSED = "no gain shown", "-", "V2 refuses it"


class Column(NamedTuple):
    """A place: an engine's label, the requests at a time, and the side compared with."""

    engine: str
    requests: int
    other: str = "stock"


COLUMNS: Mapping[str, Column] = {
    "0.5B, 128 at a time": Column("0.5B, piecewise", 128),
    "7B, 64": Column("7B, piecewise", 64),
    "Bamba (hybrid), 64": Column("hybrid, piecewise", 64),
    "Qwen3-Next (hybrid), 64": Column("Qwen3-Next, piecewise", 64),
    "0.5B, 128, HTTP, one API server": Column("0.5B, 1 API server", 128),
    "0.5B, 128, HTTP, four API servers": Column("0.5B, 4 API servers", 128),
    "over V2, 0.5B, 128": Column("0.5B, piecewise", 128, "mrv2"),
    "over 0.26.0, 0.5B, 128": Column("0.5B, piecewise", 128, "0.26.0"),
    "over 0.26.0, 7B, 64": Column("7B, piecewise", 64, "0.26.0"),
}


def update(readme: str, measured: Iterable[tuple[Group, Comparison]]) -> str:
    """Return README with its table of these comparisons of tokens/s."""
    found: dict[tuple[str, Column], list[Comparison]] = {}
    for (engine, case, (first, other)), compared in measured:
        asked, _, count = case.rpartition(", ")
        if first == "overlaid" and count.isdigit() and compared.low is not None:
            # An engine with a thinking budget configured does more for every request.
            own = (
                engine.removesuffix(", thinking budget configured")
                if "thinking" in asked
                else engine
            )
            found.setdefault((asked, Column(own, int(count), other)), []).append(compared)
    rows = [
        [
            row,
            *(_cell(found.get((asked, column), []), asked, column) for column in COLUMNS.values()),
        ]
        for row, asked in ROWS.items()
    ]
    before, head, rest = readme.partition(f"| {CORNER} |")
    _, end, after = rest.partition("\n\n")
    table = "\n".join(pipes([CORNER, *COLUMNS], rows, "l" * (1 + len(COLUMNS))))
    return before + table + end + after if head else readme


def _cell(runs: list[Comparison], asked: str, column: Column) -> str:
    if not runs:
        return REFUSED if "thinking" in asked and column.other == "mrv2" else NOT_MEASURED
    # A loss is never hidden by another run's gain.
    claims = sorted((one for one in runs if not one.mark), key=lambda one: one.ratio or 0.0)
    if not claims:
        return NO_GAIN
    # Of the three decimals that docs/measurements.md has.
    ratio, low, high = (round(bound or 0.0, 3) for bound in claims[0][2:5])
    bold = "**" * (high <= NARROW * low)
    text = f"{bold}{ratio:.2f}{bold} ({low:.2f} to {high:.2f})" + " slower" * (
        (claims[0].ratio or 0.0) < 1
    )
    return text + f" in {len(claims)} of {len(runs)} runs" * (len(claims) < len(runs))
