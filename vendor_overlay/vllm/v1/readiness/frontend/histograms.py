"""Feature ``process-outputs``: add a step's inter-token latencies to a histogram at once.

0.22.0 calls ``Histogram.observe`` for each token. Requests whose tokens came in the same two steps
have the same latency, so a step has few distinct ones, and each bucket is incremented once. The sum
is computed in the order of the tokens, so all values are equal to upstream's.
"""

# mirrors: vllm.v1.metrics.loggers:PrometheusStatLogger.record

from bisect import bisect_left
from collections import Counter
from math import isnan
from typing import Any

from prometheus_client import Histogram
from vllm.v1.readiness import registry
from vllm.v1.readiness.engine import switch

#: The library's function, if no other code has replaced it before.
_OBSERVE = vars(Histogram).get("observe")
_HOME = "prometheus_client.metrics"


def observe_all(histogram: Any, values: list[float]) -> None:  # noqa: ANN401
    """Add ``values`` to a child of a histogram, of prometheus_client or of any other library."""
    if not _is_served(histogram) or registry.PROCESS_OUTPUTS not in switch.enabled():
        for value in values:
            histogram.observe(value)
        return
    if not values:
        return
    total = histogram._sum.get()
    for value in values:
        total += value
    histogram._sum.set(total)
    buckets: Counter[int] = Counter()
    for value, count in Counter(values).items():
        if not isnan(value):  # in no bucket
            buckets[bisect_left(histogram._upper_bounds, value)] += count
    for bucket, count in buckets.items():
        histogram._buckets[bucket].inc(count)


def _is_served(histogram: object) -> bool:
    """Return whether a histogram is the library's own, with the attributes used here."""
    return (
        type(histogram) is Histogram
        and getattr(_OBSERVE, "__module__", None) == _HOME
        and not hasattr(_OBSERVE, "__wrapped__")
        and Histogram.observe is _OBSERVE
        and vars(histogram).keys() >= {"_sum", "_buckets", "_upper_bounds"}
        and "observe" not in vars(histogram)
    )
