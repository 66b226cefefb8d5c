"""Collector of the probe's histograms and gauges for vLLM's own /metrics.

Each recording process writes its histograms to a small file (``histograms``). In the API server
:class:`ProbeCollector` reads these files at each scrape.

With the overlay, ``watch.metrics`` registers the collector; on stock vLLM, a plugin calls
:func:`install`.
"""

# mirrors: vllm.v1.metrics.prometheus:get_prometheus_registry

import os
import sys
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.watch.probe.histograms import BOUNDS, METRICS, OWNED, SUFFIX, read

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

logger = init_logger(__name__)


class ProbeCollector:
    """Prometheus collector of the metrics of this host's running processes.

    Invalid files are skipped, and each is logged once.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values."""
        yield from _families().values()

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics with the values in the files."""
        from prometheus_client import utils  # not imported in a worker

        families = _families()
        seconds = [*(bound / 1e9 for bound in BOUNDS), float("inf")]
        limits: list[str] = list(map(utils.floatToGoString, seconds))
        for label, path in self._files():
            try:
                histograms, values = read(path, label)
            except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
                _warn_once(path, error)
                continue
            for (kind, owner), (counts, total) in histograms.items():
                labels = [label] if owner is None else [label, owner]
                buckets = list(zip(limits, map(float, accumulate(counts)), strict=True))
                families[kind].add_metric(labels, buckets, total / 1e9)
            for metric, named, value in values:
                families[metric].add_metric([label, *named], value)
        yield from families.values()

    def _files(self) -> list[tuple[str, str]]:
        folder, name = os.path.split(self.file)
        prefix = f"{name}."
        try:
            with os.scandir(folder) as entries:
                return sorted(
                    (entry.name[len(prefix) : -len(SUFFIX)], entry.path)
                    for entry in entries
                    if entry.name.startswith(prefix)
                    and entry.name.endswith(SUFFIX)
                    and entry.is_file()
                )
        except OSError as error:
            _warn_once(folder, error)
            return []


def install() -> None:
    """Export the probe's metrics on stock vLLM, which has no seam for them.

    Must be called before the server creates its routes. A no-op on a second call.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    if (file := switch.probe()) is None:
        return
    from vllm.v1.metrics import prometheus
    from vllm.v1.readiness.watch.metrics import register

    original = prometheus.get_prometheus_registry
    if getattr(original, "__module__", None) == __name__:
        return

    def get_prometheus_registry() -> "CollectorRegistry":
        return register(original(), ProbeCollector(file))

    # The module of the routes may have imported the function by name.
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        if name.startswith("vllm.") and namespace.get("get_prometheus_registry") is original:
            namespace["get_prometheus_registry"] = get_prometheus_registry


def _families() -> dict[str, Any]:
    """Return metric families without values: histograms by kind, other metrics by name."""
    from prometheus_client import core

    families: dict[str, Any] = {}
    for kind, (name, description) in METRICS.items():
        families[kind] = core.HistogramMetricFamily(
            f"vllm:readiness_{name}_seconds",
            description,
            labels=["process", *["owner"] * (kind == OWNED)],
        )
    for name, metric in gauges.METRICS.items():
        families[name] = core.GaugeMetricFamily(
            f"vllm:readiness_{name}", metric.description, labels=["process", *metric.labels]
        )
    return families


_warned: set[str] = set()


def _warn_once(path: str, error: Exception) -> None:
    if path not in _warned:
        _warned.add(path)
        reason = f"{type(error).__name__}: {error}"
        logger.warning("/metrics leaves out %s: %s", switch.shown(path), reason)
