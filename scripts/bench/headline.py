"""Check README's table of gains against the committed runs.

The clauses of a cell end with ";" or ".". A clause names places (see :func:`_place`), separated by
commas, and says a figure with its interval, or "no gain shown". Without a place it is of the usual
traffic. A cell that only says "no gain shown" is of every place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.measurements import Page
from bench.run import Comparison, Run, figures

#: Row of README's table to the name of its requests, and whether a thinking budget is configured.
ROWS: Mapping[str, tuple[str, bool]] = {
    "nothing special: temperature 1": ("plain", False),
    "a presence penalty": ("presence", False),
    "a presence penalty, one of 128": ("one-presence", False),
    "bad words": ("bad-words", False),
    "a thinking budget": ("thinking", True),
    "a presence penalty and a thinking budget": ("thinking-presence", True),
    "mixed sampling: penalties, top-p, seeds, logprobs": ("mixed", False),
    "a seed each": ("seeded", False),
    "5 logprobs": ("logprobs", False),
    "JSON or another grammar, a tenth of them": ("grammars", False),
}
#: The sides of the other columns.
SIDES = (("overlaid", "stock"), ("overlaid", "mrv2"))
#: Cells without a figure, where nothing was measured.
UNMEASURED = ("measure", "V2 refuses it")
NONE = "no gain shown"

_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4}
_FIGURE = re.compile(
    r"\*\*([\d.]+)\*\* \(([\d.]+) to ([\d.]+)\)(?: in (one|two|three) of (two|three|four) runs)?"
)


class Measured(NamedTuple):
    """A comparison of five rounds or more.

    Attributes:
        run: that it is of.
        engine: see :class:`bench.run.Slice`.
        asked: requests at a time.
        compared: the comparison.
    """

    run: Run
    engine: str
    asked: int
    compared: Comparison

    def __str__(self) -> str:
        """Return the place, for a fault."""
        return f"{self.asked} at a time: {self.engine}, {self.run.device}"

    @property
    def gain(self) -> bool:
        """True for a claim that the overlay is faster."""
        return not self.compared.mark and (self.compared.ratio or 0.0) > 1

    def shows(self, figures: Sequence[float]) -> bool:
        """Return whether these are the ratio and its interval, as three decimals rounded to two."""
        of = (self.compared.ratio, self.compared.low, self.compared.high)
        pairs = zip(figures, of, strict=True)
        return self.gain and all(math.isclose(a, b or 0.0, abs_tol=0.0056) for a, b in pairs)


def faults(readme: str, page: Page) -> Iterator[str]:
    """Yield a sentence for each statement of the table that the runs contradict."""
    rows = dict(_rows(readme))
    if rows.keys() != ROWS.keys():
        yield f"rows that are not known, or missing: {sorted(rows.keys() ^ ROWS.keys())}"
    for row in rows.keys() & ROWS.keys():
        for sides, cell in zip(SIDES, rows[row], strict=True):
            of = _measured(page, *ROWS[row], sides)
            yield from (f"{row}, of {sides[1]}: {fault}" for fault in _cell(cell, of))


def _rows(readme: str) -> Iterator[tuple[str, list[str]]]:
    lines = readme.partition("\n| requests with | ")[2].partition("\n\n")[0].splitlines()
    for line in lines[2:]:
        first, *rest = (cell.strip() for cell in line.strip("| ").split(" | "))
        yield first, rest


def _measured(page: Page, requests: str, reasoning: bool, sides: tuple[str, str]) -> list[Measured]:
    found = []
    for name, run in page.runs.items():
        for group, of in run.groups().items():
            engine, case, compared_sides = group
            row, _, count = case.rpartition(", ")
            configured = "thinking budget" in engine
            here = (run.load, row, configured) == ("traffic", requests, reasoning)
            if here and compared_sides == sides and "tokens/s" in figures(of):
                compared = page.compare(name, group, "tokens/s")
                if compared.low is not None:
                    found.append(Measured(run, engine, int(count), compared))
    return found


def _cell(cell: str, of: Sequence[Measured]) -> Iterator[str]:
    """Yield the faults of a cell; ``of`` is what was measured of its requests and sides."""
    if cell in UNMEASURED:
        yield from (f"it was measured: {one}" for one in of)
        return
    if cell == NONE:
        yield from _none(of, "nothing")
        return
    covered = list[Measured]()
    for clause in re.split(r"; |\. ", cell):
        figure, places = _FIGURE.search(clause), clause.partition("**")[0]
        if figure is None:
            places, said, rest = clause.partition(NONE)
            if rest or not said:
                yield f"{clause!r} says neither a figure with its interval nor {NONE!r}"
        elif clause[figure.end() :]:
            yield f"{clause!r} goes on after its figure"
        for text in places.strip(":, ").split(", "):
            found = [one for one in of if _place(text, one)]
            covered += found
            yield from _none(found, text) if figure is None else _figure(figure, found)
    for one in of:
        if one not in covered:
            yield f"it leaves out {one}"


def _none(found: Sequence[Measured], place: str) -> Iterator[str]:
    if not found:
        yield f"{place!r} was not measured"
    for one in found:
        if one.gain:
            yield f"{place!r} has a gain: {one.compared.ratio:.3f}, {one}"


def _figure(figure: re.Match[str], found: Sequence[Measured]) -> Iterator[str]:
    counts = (_WORDS.get(figure[4], 1), _WORDS.get(figure[5], 1))
    if not any(one.shows([float(figure[n]) for n in (1, 2, 3)]) for one in found):
        yield f"{figure[0]} is no claim of such an engine"
    elif counts != (sum(one.gain for one in found), len(found)):
        yield f"{figure[0]}: {sum(one.gain for one in found)} of {len(found)} runs have a gain"


def _place(text: str, one: Measured) -> bool:
    """Return whether a measurement is of a place; False if the text names no place.

    The usual place is 128 requests on a model of 0.5B. Full graphs and a number of requests are
    other ones. A model's place has each number of requests.
    """
    text = text.lower()
    if text in ("7b", "hybrid"):
        return one.engine.lower().startswith(f"{text},")
    graphs, device, counts = "piecewise", "H200", {128}
    if text == "full graphs":
        graphs, device = "full", "H100"
    elif number := re.fullmatch(r"(\w+)(?: and (\w+))? at a time", text):
        counts = {_WORDS.get(word) or int(word) for word in number.groups() if word}
    elif most := re.fullmatch(r"(\d+) and fewer", text):
        counts = set(range(1, int(most[1]) + 1))
    elif text not in ("", "yes"):
        return False
    usual = one.engine.startswith(f"0.5B, {graphs}") and "VLLM_READINESS" not in one.run.environment
    return usual and one.asked in counts and device in one.run.device
