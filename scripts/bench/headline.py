"""README's table of gains, made of the committed runs.

A cell shows the ratio of tokens/s and its interval for each place that has a gain, and names the
places that have none. The usual place, 128 requests at a time on a model of 0.5B, has no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from bench.markdown import pipes
from bench.run import Comparison, Group

#: Row of the table to the name of its requests.
ROWS: Mapping[str, str] = {
    "nothing special: temperature 1": "plain",
    "a presence penalty": "presence",
    "a presence penalty, one of 128": "one-presence",
    "bad words": "bad-words",
    "a thinking budget": "thinking",
    "a presence penalty and a thinking budget": "thinking-presence",
    "mixed sampling: penalties, top-p, seeds, logprobs": "mixed",
    "a seed each": "seeded",
    "5 logprobs": "logprobs",
    "JSON or another grammar, a tenth of them": "grammars",
}
HEAD = ("requests with", "tokens/s, of stock's", "of Model Runner V2's")
#: Sides of the other columns.
SIDES = (("overlaid", "stock"), ("overlaid", "mrv2"))


def update(readme: str, measured: Iterable[tuple[Group, Comparison]]) -> str:
    """Return README with its table of these comparisons of tokens/s."""
    known = [one for one in measured if one[1].low is not None]
    rows = [[row, *(_cell(known, asked, of) for of in SIDES)] for row, asked in ROWS.items()]
    before, head, rest = readme.partition(f"| {HEAD[0]} |")
    _, end, after = rest.partition("\n\n")
    return before + "\n".join(pipes(HEAD, rows, "lll")) + end + after if head else readme


def _cell(known: Iterable[tuple[Group, Comparison]], asked: str, sides: tuple[str, str]) -> str:
    places: dict[tuple[bool, str, int], list[Comparison]] = {}
    for (engine, case, of), compared in known:
        row, _, count = case.rpartition(", ")
        # An engine with a thinking budget configured does more for every request.
        if (row, of, "thinking" in engine) == (asked, sides, "thinking" in asked):
            unusual = not (engine.startswith("0.5B, piecewise") and count == "128")
            places.setdefault((unusual, engine, int(count)), []).append(compared)
    if not places:
        return "V2 refuses it" if "thinking" in asked else "measure"
    gains, others = list[str](), list[str]()
    for (unusual, engine, asking), of_place in sorted(places.items()):
        place = _place(engine, asking) if unusual else "yes," * (sides[1] == "stock")
        claims = [one for one in of_place if not one.mark and (one.ratio or 0.0) > 1]
        if claims:
            # Of the three decimals that docs/measurements.md has.
            ratio, low, high = (f"{round(bound or 0.0, 3):.2f}" for bound in claims[0][2:5])
            seen = f" in {len(claims)} of {len(of_place)} runs" * (claims != of_place)
            gains.append(f"{place} **{ratio}** ({low} to {high}){seen}".strip())
        else:
            others.append(place if unusual else f"{asking} at a time")
    if not gains and not min(places)[0]:
        return "no gain shown"
    named = re.sub(r"(\d+) at a time(?=, \d+ at a time)", r"\1", ", ".join(others))
    named = f"{named}: no gain shown" if others else ""
    return f"{'; '.join(gains)}. {named[:1].upper()}{named[1:]}".strip(". ") if gains else named


def _place(engine: str, count: int) -> str:
    """Name a place: the model, full graphs, or the number of requests."""
    model, graphs, *_ = engine.split(", ")
    if model != "0.5B":
        return model
    return "full graphs" if graphs == "full" else f"{count} at a time"
