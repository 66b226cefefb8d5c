"""Slices and runs of the benchmark, made up: nothing in them was measured."""

import copy
from collections.abc import Mapping
from typing import Any

from bench.harness.machine import SCHEMA
from bench.results.slices import grouped

#: A name that a page must show as text.
HOSTILE = '<script>alert("x")</script> & | "quoted"'
SIDES = ("overlaid", "stock")


def slice_of(
    number: int,
    order: int | None,
    first: float,
    second: float,
    *,
    figure: str = "tokens/s",
    sides: tuple[str, str] = SIDES,
    case: str = "plain, 4",
    **more: Any,
) -> dict[str, Any]:
    """A slice of one figure."""
    figures = {side: {figure: value} for side, value in zip(sides, (first, second), strict=True)}
    about = {"round": number, "order": order, "engine": "tiny", "case": case}
    return {**about, "sides": [*sides], "figures": figures, "problems": [], "disturbed": [], **more}


def pairs(*ratios: float, **more: Any) -> list[dict[str, Any]]:
    """Exchanged pairs with these ratios; the first place is 1.5 times as fast."""
    return [
        one
        for number, ratio in enumerate(ratios, 1)
        for one in (
            slice_of(number, 0, 150 * ratio, 100, **more),
            slice_of(number, 1, 100 * ratio, 150, **more),
        )
    ]


def run(*slices: Mapping[str, Any], **changed: Any) -> dict[str, Any]:
    """A whole run that is as its manifest decided."""
    digests = {"stock": "12ab" * 16, "overlaid": "89ef" * 16}
    command = "PYTHONPATH=scripts python -m bench.traffic --site /opt/site --out DIR"
    groups = grouped(slices)
    rounds = {len({one["round"] for one in of}) for of in groups.values()}
    manifest = {
        **{"command": command, "commit": "ab" * 20, "changed": [], "limit": None},
        "digests": dict(digests),
        "rounds": max(rounds, default=1),
        "groups": [[engine, case, list(sides)] for engine, case, sides in groups],
    }
    machine = {
        **{"device": "NVIDIA H100 80GB HBM3", "cpu": "AMD EPYC 9654", "cores": 16},
        **{"memory GiB": 128, "driver": "570.124", "system": "Ubuntu 24.04, Linux 6.8"},
    }
    versions = {"vllm": "0.22.0", "torch": "2.11.0", "python": "3.12.3", "overlay": "0.9.0"}
    whole = {
        **{"schema": SCHEMA, "command": command, "date": "2026-11-26", "seconds": 60.0},
        **{"machine": machine, "versions": versions, "digests": digests, "complete": True},
        **{"environment": {"VLLM_READINESS": "-fixes"}, "manifest": manifest},
        **{"title": "Made up.", "slices": list(slices), "problems": []},
    }
    return copy.deepcopy({**whole, **changed})
