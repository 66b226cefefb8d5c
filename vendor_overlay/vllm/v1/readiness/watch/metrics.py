"""The overlay's metrics on vLLM's own /metrics.

``vllm:readiness_info`` names the overlay that serves, and ``vllm:readiness_fallbacks_total`` counts
fallbacks to upstream. Both are always on. The probe, if it is on, adds its own collector.
"""

# mirrors: vllm.v1.metrics.prometheus:get_prometheus_registry

import os
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.logger import init_logger
from vllm.v1.readiness import registry as words
from vllm.v1.readiness.engine import gauges, identity, switch
from vllm.v1.readiness.version import __version__
from vllm.v1.readiness.watch import exports

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

logger = init_logger(__name__)


class ExportsCollector:
    """Prometheus collector of what the engine's processes export."""

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values."""
        yield from self._families([], Counter())

    def collect(self) -> "Iterator[Metric]":
        """Yield the info of each runner, and fallbacks summed over processes."""
        infos: list[dict[str, str]] = []
        fallbacks: Counter[tuple[str, str]] = Counter()
        for name, labels, value in exports.read():
            if name == exports.INFO and isinstance(labels, dict) and labels not in infos:
                infos.append(labels)
            elif name == gauges.FALLBACKS and isinstance(labels, list):
                feature, reason = labels
                fallbacks[feature, reason] += value
        yield from self._families(infos or [info("unknown", switch.enabled())], fallbacks)

    @staticmethod
    def _families(
        infos: list[dict[str, str]], fallbacks: "Counter[tuple[str, str]]"
    ) -> "Iterator[Metric]":
        from prometheus_client import core  # not imported in a worker

        names = ("version", "digest", "runner", "on", "off")
        serving = core.GaugeMetricFamily(
            "vllm:readiness_info", "The readiness overlay that serves; always 1.", labels=names
        )
        for labels in infos:
            serving.add_metric([labels[name] for name in names], 1)
        counted = core.CounterMetricFamily(
            f"vllm:readiness_{gauges.FALLBACKS}",
            "Fallbacks of an enabled feature to vLLM's own path.",
            labels=["feature", "reason"],
        )
        for key, number in fallbacks.items():
            counted.add_metric(key, number)
        return iter((serving, counted))


def info(runner: str, acting: frozenset[str]) -> dict[str, str]:
    """Return the labels of ``vllm:readiness_info``.

    ``runner`` is ``V1``, ``V2`` or ``unknown``; ``acting`` has the words that take effect.
    """
    return {
        "version": __version__,
        "digest": _digest(),
        "runner": runner,
        "on": ",".join(sorted(acting)),
        "off": ",".join(sorted(words.ALL - acting)),
    }


@cache
def _digest() -> str:
    return identity.digest() or ""


def expose(registry: "CollectorRegistry") -> "CollectorRegistry":
    """Add the overlay's collectors to /metrics, once; return ``registry``.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    collectors: list[Collector] = [ExportsCollector()]
    if switch.probe() is not None:
        from vllm.v1.readiness.watch.probe.histograms import ProbeCollector

        collectors.append(ProbeCollector())
    return register(registry, *collectors)


_registered: "WeakKeyDictionary[CollectorRegistry, set[type]]" = WeakKeyDictionary()
_lock = threading.Lock()


def register(registry: "CollectorRegistry", *collectors: "Collector") -> "CollectorRegistry":
    """Register one collector per class with a registry, and return the registry.

    With several API servers, the /metrics route of prometheus_fastapi_instrumentator creates a
    registry per scrape, and registers only ``prometheus_client.multiprocess.MultiProcessCollector``
    with it. The collectors are then registered together with that.
    """
    with _lock:
        known = _registered.setdefault(registry, set())
        for collector in collectors:
            if type(collector) not in known:
                known.add(type(collector))
                try:
                    registry.register(collector)
                except ValueError as error:
                    logger.warning("/metrics leaves out the overlay's metrics: %s", error)
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _register_with_multiprocess(collectors)
    return registry


def _register_with_multiprocess(collectors: "tuple[Collector, ...]") -> None:
    from prometheus_client import multiprocess

    original = multiprocess.MultiProcessCollector
    if original.__module__ == __name__:
        return

    class MultiProcessCollector(original):  # type: ignore[misc, valid-type]
        def __init__(self, registry: "CollectorRegistry | None", path: str | None = None) -> None:
            super().__init__(registry, path)
            if registry is not None:
                register(registry, *collectors)

    multiprocess.MultiProcessCollector = MultiProcessCollector  # type: ignore[misc]
