"""The probe's histograms: counted in each process's exported file, collected for /metrics."""

# mirrors: nothing

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm.v1.readiness.engine import gauges
from vllm.v1.readiness.watch import exports

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: Inclusive upper bounds of the buckets in nanoseconds: 1 us to 10 s.
BOUNDS = (*(step * 10**power for power in range(2, 9) for step in (10, 25, 50)), 10**10)
#: Histograms: help text, and the label besides ``process``.
METRICS: Mapping[str, gauges.Metric] = MappingProxyType(
    {
        "execute_model": gauges.Metric("Host time in the worker's execute_model.", ()),
        "sample_tokens": gauges.Metric("Host time in the worker's sample_tokens.", ()),
        "get_output": gauges.Metric("Host time in getting a step's output, waits included.", ()),
        "fence": gauges.Metric("Host time in one wait for the device, by owner.", ("owner",)),
        "device": gauges.Metric("Time of the device's stream between two ends.", ("part",)),
        "output_interval": gauges.Metric("Time between two outputs, pauses left out.", ()),
        "schedule": gauges.Metric("Host time in the scheduler's schedule.", ()),
        "update_from_output": gauges.Metric("Host time in update_from_output.", ()),
    }
)
#: Counter of sampled tokens.
TOKENS = "tokens"
_SUM = "sum"


class _Series:
    """Counts per bucket and sum of one histogram, with their keys in the exported file."""

    def __init__(self, name: str, labels: tuple[str, ...]) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0
        buckets = [*range(len(self.counts)), _SUM]
        self.keys = [json.dumps([name, [*labels, str(bucket)]]) for bucket in buckets]

    def add(self, nanoseconds: int) -> None:
        bucket = bisect_left(BOUNDS, nanoseconds)
        self.counts[bucket] += 1
        self.total += nanoseconds
        exports.write(self.keys[bucket], self.counts[bucket])
        exports.write(self.keys[-1], self.total)


_series: dict[tuple[str, ...], _Series] = {}
_tokens: Counter[str] = Counter()


def observe(name: str, nanoseconds: int, *labels: str) -> None:
    """Count a duration. ``labels`` begin with the process. Thread-safe."""
    with gauges.lock:
        series = _series.get((name, *labels))
        if series is None:
            series = _series[(name, *labels)] = _Series(name, labels)
        series.add(nanoseconds)


def count_tokens(process: str, number: int) -> None:
    """Count sampled tokens. Thread-safe."""
    with gauges.lock:
        _tokens[process] += number
        exports.write(json.dumps([TOKENS, [process]]), _tokens[process])


def export_gauges(process: str) -> None:
    """Export the current values of :mod:`gauges`."""
    values = gauges.collect()
    with gauges.lock:
        for metric, labels, value in values:
            exports.write(json.dumps([metric, [process, *labels]]), value)


def clear() -> None:
    """Begin at zero, as in a forked process."""
    _series.clear()
    _tokens.clear()


class ProbeCollector:
    """Prometheus collector of the histograms and gauges of this host's processes."""

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values."""
        yield from _families().values()

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics, summed over processes of one name."""
        from prometheus_client import utils  # not imported in a worker

        families = _families()
        values: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for name, labels, value in exports.read():
            if name in families and isinstance(labels, list):
                values[name, tuple(labels)] += value
        series: dict[tuple[str, tuple[str, ...]], dict[str, int]] = {}
        for (name, labels), value in values.items():
            if name in METRICS:
                series.setdefault((name, labels[:-1]), {})[labels[-1]] = value
            else:
                families[name].add_metric(labels, value)
        bounds = [*(bound / 1e9 for bound in BOUNDS), float("inf")]
        limits = list(map(utils.floatToGoString, bounds))
        for (name, labels), parts in series.items():
            counts = accumulate(parts.get(str(bucket), 0) for bucket in range(len(limits)))
            buckets = list(zip(limits, map(float, counts), strict=True))
            families[name].add_metric(labels, buckets, parts.get(_SUM, 0) / 1e9)
        yield from families.values()


def _families() -> dict[str, Any]:
    """Return metric families without values, by name."""
    from prometheus_client import core

    prefix = "vllm:readiness_"
    families: dict[str, Any] = {
        TOKENS: core.CounterMetricFamily(
            f"{prefix}{TOKENS}", "Tokens that the scheduler took in.", labels=["process"]
        )
    }
    for name, metric in METRICS.items():
        families[name] = core.HistogramMetricFamily(
            f"{prefix}{name}_seconds", metric.description, labels=["process", *metric.labels]
        )
    for name, metric in gauges.METRICS.items():
        families[name] = core.GaugeMetricFamily(
            f"{prefix}{name}", metric.description, labels=["process", *metric.labels]
        )
    return families
