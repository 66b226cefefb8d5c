"""A run's plots, as SVG that takes its colours and its typeface from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import blended_transform_factory

#: A page has the colours; matplotlib is given stand-ins that are replaced by them.
COLOURS = {
    "ink": "#010101",
    "faint": "#020202",
    "rule": "#030303",
    "stock": "#040404",
    "overlaid": "#050505",
    "mrv2": "#060606",
    "sampling": "#070707",
    "output": "#080808",
    "launch": "#090909",
    "copy": "#0a0a0a",
    "fence": "#0b0b0b",
    "other": "#0c0c0c",
}
DASHES = {"stock": (0, (5, 2)), "overlaid": "-", "mrv2": (0, (1, 1.5))}
#: In the SVG's own units, which a page shows no smaller than CSS's pixels at 320 of them.
WIDTH = 320
TEXT = 12.5
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "text.parse_math": False,  # names are not formulas, whatever they hold
    "font.size": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": TEXT,
    "ytick.labelsize": TEXT,
    "text.color": COLOURS["ink"],
    "axes.labelcolor": COLOURS["faint"],
    "axes.edgecolor": COLOURS["rule"],
    "xtick.color": COLOURS["rule"],
    "ytick.color": COLOURS["rule"],
    "xtick.labelcolor": COLOURS["faint"],
    "ytick.labelcolor": COLOURS["faint"],
    "grid.color": COLOURS["rule"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "path.simplify": True,
}
#: The bar's parts: where the host waits, and the colour of it.
WAITS = {
    "sample_tokens": ("waiting in sample_tokens, ms a step", "sampling"),
    "get_output": ("waiting in get_output, ms a step", "output"),
}
TRACKS = ("host", "device to host", "output")


def step_time(series: Mapping[str, Any], name: str, prefix: str) -> str | None:
    """Step time against output length, a line a side; None if no side has a point.

    Args:
        series: side to "length" and "ms", of a case.
        name: what a reader hears who does not see it.
        prefix: of the ids in it, which no other plot of the page has.
    """
    lines = {side: points(found) for side, found in series.items()}
    if not any(lines.values()):
        return None
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(190)
        for side, line in lines.items():
            axes.plot(
                [x for x, _ in line],
                [y for _, y in line],
                color=COLOURS.get(side, COLOURS["other"]),
                linestyle=DASHES.get(side, "-"),
                linewidth=2,
                marker="o" if len(line) < 13 else None,
                markersize=4,
            )
        highest = max(y for line in lines.values() for _, y in line)
        axes.set_ylim(0, highest * 1.15 or 1.0)
        axes.set_xlim(left=0)
        axes.grid(axis="y", linewidth=0.6)
        axes.tick_params(length=0)
        axes.locator_params(axis="both", nbins=4)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.set_xlabel("output tokens so far")
        axes.set_ylabel("ms a step")
        return _svg(figure, name, prefix)


def points(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """The points of one side's series, without what was not seen."""
    pairs = zip(found.get("length", ()), found.get("ms", ()), strict=False)
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def waits(cases: Mapping[str, Any], sides: Sequence[str], name: str, prefix: str) -> str | None:
    """Where the host waits in a step, a bar a case and side; None if it was seen nowhere."""
    bars: list[tuple[str | None, str, dict[str, float | None]]] = []
    for label, case in cases.items():
        lines = [(side, waiting(case, side)) for side in sides]
        seen = [(side, parts) for side, parts in lines if set(parts.values()) != {None}]
        bars += [(None if at else label, side, parts) for at, (side, parts) in enumerate(seen)]
    if not bars:
        return None
    rows: list[float] = []
    at = 0.0
    for heading, _, _ in bars:
        at += 2.1 if heading is not None else 1.0
        rows.append(at)
    longest = max(sum(value or 0.0 for value in parts.values()) for _, _, parts in bars)
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(at * 19 + 34)
        for row, (heading, _, parts) in zip(rows, bars, strict=True):
            if heading is not None:
                _left(axes, row - 1.05, shortened(heading, 40))
            left = 0.0
            for part, value in parts.items():
                width = value or 0.0
                colour = COLOURS[WAITS[part][1]]
                axes.barh(row, width, 0.68, left, color=colour, linewidth=0)
                left += width
            axes.text(left + longest * 0.02, row, _ms(left), va="center", color=COLOURS["ink"])
        axes.set_yticks(rows, [shortened(side, 12) for _, side, _ in bars])
        axes.set_ylim(at + 0.7, 0.4)
        axes.set_xlim(0, (longest or 1.0) * 1.22)
        axes.grid(axis="x", linewidth=0.6)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=4)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlabel("ms of waiting a step")
        return _svg(figure, name, prefix)


def waiting(case: Mapping[str, Any], side: str) -> dict[str, float | None]:
    """Where one side waits: part to milliseconds a step, None if not seen."""
    figures = case["figures"]
    return {part: figures.get(figure, {}).get(side) for part, (figure, _) in WAITS.items()}


def timeline(
    spans: Mapping[str, Sequence[Mapping[str, Any]]], name: str, prefix: str
) -> str | None:
    """Three steps, a lane a track for each side, on one scale; None if there is no span."""
    sides = {side: found for side, found in spans.items() if found}
    if not sides:
        return None
    begin = {side: min(span["start"] for span in found) for side, found in sides.items()}
    end = max(span["end"] - begin[side] for side, found in sides.items() for span in found)
    with mpl.rc_context(SETTINGS):
        rows: dict[float, str] = {}
        at = 0.0
        made: list[tuple[float, Mapping[str, Any], float]] = []
        heads: list[tuple[float, str]] = []
        for side, found in sides.items():
            at += 1.0
            heads.append((at, side))
            for track in [*TRACKS, *sorted({span["track"] for span in found} - set(TRACKS))]:
                ours = [span for span in found if span["track"] == track]
                if not ours:
                    continue
                at += 1.0
                rows[at] = shortened(track, 16)
                made += [(at, span, begin[side]) for span in sorted(ours, key=length, reverse=True)]
        figure, axes = _figure(at * 22 + 34)
        for row, span, first in made:
            # What is too short to be seen is shown as a stroke.
            wide = max(length(span), end / 300)
            inner = is_inner(span["name"])
            box = Rectangle(
                (span["start"] - first, row - (0.2 if inner else 0.36)),
                wide,
                0.4 if inner else 0.72,
                facecolor=COLOURS[colour_of(span)],
                linewidth=0,
            )
            axes.add_patch(box)
        for row, side in heads:
            colour = COLOURS.get(side, COLOURS["ink"])
            _left(axes, row, shortened(side, 38), color=colour, fontweight="bold")
        axes.set_yticks(list(rows), list(rows.values()))
        axes.set_ylim(at + 0.7, 0.5)
        axes.set_xlim(0, end * 1.01 or 1.0)
        axes.grid(axis="x", linewidth=0.6)
        axes.tick_params(length=0)
        axes.locator_params(axis="x", nbins=5)
        axes.spines["left"].set_visible(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlabel("ms")
        return _svg(figure, name, prefix)


def length(span: Mapping[str, Any]) -> float:
    """Of a span, in milliseconds."""
    took: float = span["end"] - span["start"]
    return took


def is_inner(name: str) -> bool:
    """Whether a span lies within another of its track, and is drawn narrower."""
    return name.startswith("fence") or name.startswith("wait")


def colour_of(span: Mapping[str, Any]) -> str:
    """The name of a span's colour."""
    name = span["name"]
    if is_inner(name):
        return "fence"
    if span["track"] == "device to host":
        return "copy"
    known = {"execute_model": "launch", "sample_tokens": "sampling", "get_output": "output"}
    return known.get(name, "other")


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _left(axes: Axes, row: float, text: str, **style: Any) -> None:
    """Write a heading over a bar, from the figure's left edge on."""
    across = blended_transform_factory(axes.figure.transFigure, axes.transData)
    axes.text(0.005, row, text, transform=across, va="center", **style).set_in_layout(False)


def _ms(value: float) -> str:
    return f"{value:.2f}" if value < 99.5 else f"{value:,.0f}"


def _figure(height: float) -> tuple[Figure, Axes]:
    """A figure of :data:`WIDTH` by ``height`` units, 72 of which are matplotlib's inch."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
    axes = figure.add_subplot()
    return figure, axes


def _svg(figure: Figure, name: str, prefix: str) -> str:
    """The figure as an SVG element for a page, ``name`` and ``prefix`` as for the plots."""
    sink = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(sink, format="svg", transparent=True, metadata=nothing)
    svg = sink.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg))
    svg = re.sub(
        r' id="([^"]+)"',
        lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "",
        svg,
    )
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for colour, stand_in in COLOURS.items():
        svg = re.sub(rf"((?:fill|stroke): ){stand_in}", rf"\g<1>var(--{colour})", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    # In a page it would be the rule for every element.
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\n\s*", "\n", svg)
    box = re.search(r'viewBox="([^"]+)"', svg)
    assert box is not None
    head = f'<svg viewBox="{box[1]}" role="img" aria-label="{_attribute(name)}" '
    head += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return head + svg[svg.index(">") + 1 :].strip()


def _attribute(text: str) -> str:
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(plain, escaped)
    return text
