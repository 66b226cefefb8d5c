"""Slices and runs of the benchmark, made up: nothing in them was measured."""

from dataclasses import replace
from typing import Any

from bench.run import Run, Slice

#: A name that a page must show as text.
HOSTILE = '<script>alert("x")</script> & | "quoted"'
RUN = Run(
    command="PYTHONPATH=scripts python -m bench.traffic --site /opt/site --out DIR",
    commit="ab" * 20,
    date="2026-11-26",
    device="NVIDIA H100 80GB HBM3",
    host="16 cores of AMD EPYC 9654, vLLM 0.22.0, torch 2.11.0, Python 3.12.3",
    digests={"stock": "12ab" * 16, "overlaid": "89ef" * 16},
    environment={"VLLM_READINESS": "-fixes"},
    load="traffic",
    title="Made up.",
    seconds=60.0,
    complete=True,
)


def slice_of(
    number: int,
    order: int | None,
    first: float,
    second: float,
    *,
    figure: str = "tokens/s",
    sides: tuple[str, str] = ("overlaid", "stock"),
    case: str = "plain, 4",
    disturbed: list[str] | None = None,
) -> Slice:
    """A slice of one figure."""
    figures = [{figure: first}, {figure: second}]
    return Slice(number, order, "tiny, none", case, sides, figures, disturbed or [])


def pairs(*ratios: float, **more: Any) -> list[Slice]:
    """Exchanged pairs with these ratios; the first place is 1.5 times as fast."""
    return [
        one
        for number, ratio in enumerate(ratios, 1)
        for one in (
            slice_of(number, 0, 150 * ratio, 100, **more),
            slice_of(number, 1, 100 * ratio, 150, **more),
        )
    ]


def run(*slices: Slice, **changed: Any) -> Run:
    """A whole run."""
    return replace(RUN, **{"slices": list(slices), "problems": [], **changed})
