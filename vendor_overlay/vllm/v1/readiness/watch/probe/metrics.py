"""Export of the probe's histograms and gauges on vLLM's own /metrics.

Each recording process writes its histograms to a small file (``histograms``). In the API server
:class:`ProbeCollector` reads these files at each scrape.

``vllm.v1.metrics.prometheus`` calls ``expose`` if the overlay is installed; otherwise a plugin
calls ``install``. Both are no-ops without VLLM_READINESS_PROBE.
"""

# mirrors: vllm.v1.metrics.prometheus:get_prometheus_registry

import os
import sys
import threading
import weakref
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


def expose(registry: "CollectorRegistry") -> "CollectorRegistry":
    """Add the probe's collector to /metrics, once, if the probe is on; return ``registry``.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    file = switch.probe()
    if file is not None:
        _register(registry, file)
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            _register_with_multiprocess(file)
    return registry


def install() -> None:
    """Export the probe's metrics on stock vLLM, which does not call ``expose``.

    Must be called before the server creates its routes. A no-op on a second call.

    Raises:
        PathError: VLLM_READINESS_PROBE names a file that cannot be written.
    """
    if switch.probe() is None:
        return
    from vllm.v1.metrics import prometheus

    original = prometheus.get_prometheus_registry
    if getattr(original, "__module__", None) == __name__:
        return

    def get_prometheus_registry() -> "CollectorRegistry":
        return expose(original())

    # The module of the routes may have imported the function by name.
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        if name.startswith("vllm.") and namespace.get("get_prometheus_registry") is original:
            namespace["get_prometheus_registry"] = get_prometheus_registry


_registries: "weakref.WeakSet[CollectorRegistry]" = weakref.WeakSet()
_lock = threading.Lock()
_warned: set[str] = set()


def _register(registry: "CollectorRegistry", file: str) -> None:
    with _lock:
        if registry in _registries:
            return
        try:
            registry.register(ProbeCollector(file))
        except ValueError:
            _warn_once(file, "other metrics have the same names")
        _registries.add(registry)


def _register_with_multiprocess(file: str) -> None:
    """Register the collector with each registry that gets a ``MultiProcessCollector``.

    With several API servers, the /metrics route of prometheus_fastapi_instrumentator creates a
    registry per scrape, and registers only ``prometheus_client.multiprocess.MultiProcessCollector``
    with it.
    """
    from prometheus_client import multiprocess

    original = multiprocess.MultiProcessCollector
    if original.__module__ == __name__:
        return

    class MultiProcessCollector(original):  # type: ignore[misc, valid-type]
        def __init__(self, registry: "CollectorRegistry | None", path: str | None = None) -> None:
            super().__init__(registry, path)
            if registry is not None:
                _register(registry, file)

    multiprocess.MultiProcessCollector = MultiProcessCollector  # type: ignore[misc]


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
    types = {"counter": core.CounterMetricFamily, "gauge": core.GaugeMetricFamily}
    for name, metric in gauges.METRICS.items():
        families[name] = types[metric.kind](
            f"vllm:readiness_{name}", metric.description, labels=["process", *metric.labels]
        )
    return families


def _warn_once(path: str, reason: Exception | str) -> None:
    if path not in _warned:
        _warned.add(path)
        if isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}"
        logger.warning("/metrics leaves out %s: %s", switch.shown(path), reason)
