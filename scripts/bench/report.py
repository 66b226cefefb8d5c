"""From what the children measured to one table, and to no ratio that means nothing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench import outputs
from bench.rows import BASELINE, ROWS
from bench.sides import SIDES

#: What a child wrote, with the "side" and "round" that the parent adds.
Child = Mapping[str, Any]

_KINDS = ("tokens", "logprobs")


def summary(children: Sequence[Child]) -> dict[str, Any]:
    """Row to case to what was found of it.

    Each case has the ``rounds`` and the median of every figure on each side, the ratio of
    the medians, the fences by owner, and ``problems``: why there is no ratio, if so.
    """
    found: dict[str, Any] = {}
    for row in dict.fromkeys(child["row"] for child in children):
        ours = [child for child in children if child["row"] == row]
        found[row] = {case: _case(case, ours) for case in ROWS[row].cases}
    return found


def _case(case: str, children: Sequence[Child]) -> dict[str, Any]:
    problems = [
        f"{_name(child)}: {text}" for child in children for text in child["cases"][case]["problems"]
    ]
    problems += _differences(case, children)
    problems += [
        f"{side} was not measured"
        for side in SIDES
        if not any(child["side"] == side for child in children)
    ]
    figures = {}
    for figure in children[0]["cases"][case]["figures"]:
        rounds = {
            side: [
                child["cases"][case]["figures"][figure]
                for child in children
                if child["side"] == side
            ]
            for side in SIDES
        }
        medians = {side: _median(values) for side, values in rounds.items()}
        ratio = None if problems else _ratio(medians["overlaid"], medians["stock"])
        figures[figure] = {**medians, "ratio": ratio, "rounds": rounds}
    return {
        "figures": figures,
        "fences": {
            side: [child["cases"][case]["fences"] for child in children if child["side"] == side]
            for side in SIDES
        },
        "counts": [child["cases"][case]["counts"] for child in children],
        "problems": problems,
    }


def _differences(case: str, children: Sequence[Child]) -> Iterable[str]:
    """Where each child's output parts from the first stock child's (or, without one, any's)."""
    first = next((child for child in children if child["side"] == "stock"), children[0])
    for child in children:
        for kind in _KINDS:
            one, other = first["cases"][case], child["cases"][case]
            if one["sha256"][kind] == other["sha256"][kind]:
                continue
            where = outputs.first_difference(outputs.unpack(one[kind]), outputs.unpack(other[kind]))
            yield f"{kind} of {_name(first)} and {_name(child)} differ: {where}"


def markdown(report: Mapping[str, Any]) -> str:
    """The report for people: one table a row, and a line for all that spoils a ratio."""
    lines = [
        f"{report['device']}, {report['date']}, vLLM {report['vllm']}, torch {report['torch']}, "
        f"overlay digest {report['digest'][:12]}",
        "",
        f"`{report['command']}`",
    ]
    for name, cases in report["rows"].items():
        row = report["shapes"][name]
        lines += [
            "",
            f"**{name}**: batch {row['batch']}, {row['prompt']}-token prompts, "
            f"{row['output']} output tokens, {row['scheduling']} scheduling; "
            f"median of {row['rounds']} rounds, times in ms",
            "",
            "| case | figure | stock | overlaid | ratio |",
            "| --- | --- | ---: | ---: | ---: |",
        ]
        for case, found in cases.items():
            for figure, values in found["figures"].items():
                shown = [_number(values[side]) for side in SIDES]
                ratio = "refused" if found["problems"] else _number(values["ratio"], 3)
                lines.append(f"| {case} | {figure} | {' | '.join(shown)} | {ratio} |")
        lines += _against_baseline(cases)
        lines.append("")
        for case, found in cases.items():
            verdict = "; ".join(found["problems"]) or "counts as expected, outputs identical"
            fences = ", ".join(
                f"{side} {_fences(found['fences'][side], row['output'])}" for side in SIDES
            )
            lines.append(f"- {case}: {verdict}. Fences by owner: {fences}.")
        if any(_unseen(values) for found in cases.values() for values in found["figures"].values()):
            lines.append("- What shows `-` was not seen: it happened in a worker's own process.")
    lines += ["", *(f"FAILED: {error}" for error in report["errors"])]
    return "\n".join(lines).rstrip() + "\n"


def _against_baseline(cases: Mapping[str, Any]) -> Iterable[str]:
    """What a case costs on the same side: its figures over those of the case without."""
    for case, found in cases.items():
        if case == BASELINE or found["problems"] or cases[BASELINE]["problems"]:
            continue
        for figure, values in found["figures"].items():
            if figure != "tokens/s" and not figure.startswith("ITL"):
                continue
            without = cases[BASELINE]["figures"][figure]
            shown = [_number(_ratio(values[side], without[side]), 3) for side in SIDES]
            yield f"| {case} / {BASELINE} | {figure} | {' | '.join(shown)} | |"


def _unseen(values: Mapping[str, Any]) -> bool:
    """Whether a side that was measured lacks this figure."""
    return any(values[side] is None and values["rounds"][side] for side in SIDES)


def _name(child: Child) -> str:
    return f"{child['side']} round {child['round']}"


def _median(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return statistics.median(seen) if seen else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}f}"


def _fences(rounds: Sequence[Mapping[str, int]], steps: int) -> str:
    """The most fences of each owner in a round; and in a thousand of its steps."""
    if not any(rounds):
        return "none counted"
    owners = sorted({owner for counts in rounds for owner in counts})
    most = {owner: max(counts.get(owner, 0) for counts in rounds) for owner in owners}
    return " ".join(
        f"{owner} {n} ({n / steps * 1e3:.1f} a thousand steps)" for owner, n in most.items()
    )
