"""Quantiles of the parts of a step, and the ratios that are made of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

#: The parts of a step in its order. The runner's own come after the part that they are of.
PARTS = (
    "schedule",
    "execute_model",
    "_update_states",
    "_prepare_inputs",
    "_build_attention_metadata",
    "sample_tokens",
    "update_from_output",
)
#: Ratio to its two engines. Of the last, all that differs from 1 is noise.
RATIOS: Mapping[str, tuple[str, str]] = {
    "overlaid / stock": ("overlaid", "stock"),
    "overlaid / mrv2": ("overlaid", "mrv2"),
    "stock again / stock": ("stock again", "stock"),
}
QUANTILES = ("p10", "p50")

#: Quantile to value.
Quantiles = dict[str, float]


def quantiles(values: Sequence[float]) -> Quantiles:
    """Return the tenth percentile and the median."""
    tenth, *_ = statistics.quantiles(values, n=10, method="inclusive")
    return {"p10": tenth, "p50": statistics.median(values)}


def summary(times: Mapping[str, Sequence[float]]) -> dict[str, Quantiles]:
    """Return the quantiles of each engine.

    A ratio is made of two engines' quantiles. Quantiles of the ratios of single steps are no
    figures of anything: of two engines that are alike, the tenth percentile is less than 1.

    Args:
        times: engine to the time of each step.
    """
    return {engine: quantiles(values) for engine, values in times.items()}
