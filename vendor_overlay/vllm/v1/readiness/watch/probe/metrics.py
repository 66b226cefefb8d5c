"""The probe's durations as Prometheus histograms, and gauges, on vLLM's own /metrics.

Workers and engine cores record; the server, which is another process, answers scrapes. Each
process that records writes its histograms to a small file (``histograms``), and the server's
:class:`ProbeCollector` reads these files when it is scraped. A step is not involved.

``expose`` is called by ``vllm.v1.metrics.prometheus`` where the overlay is installed, and
``install`` by a plugin where it is not. Without VLLM_READINESS_PROBE neither does anything.
"""

# mirrors: vllm.v1.metrics.prometheus:get_prometheus_registry

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.watch.probe.histograms import BOUNDS, METRICS, OWNED, SUFFIX, read

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )

logger = init_logger(__name__)


class ProbeCollector:
    """A Prometheus collector of the histograms and gauges of this host's living processes.

    An invalid file is left out, and logged once. It does not fail the scrape, which carries
    vLLM's own metrics.

    Args:
        file: the path that VLLM_READINESS_PROBE names.
    """

    def __init__(self, file: str) -> None:
        self.file = file

    def describe(self) -> "Iterator[Metric]":
        """Yield the metrics without values."""
        yield from _families().values()
        yield from _gauges().values()

    def collect(self) -> "Iterator[Metric]":
        """Yield the metrics with the values that the files hold now."""
        from prometheus_client import utils  # not needed in a worker

        families, others = _families(), _gauges()
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
                others[metric].add_metric([label, *named], value)
        yield from families.values()
        yield from others.values()

    def _files(self) -> list[tuple[str, str]]:
        """List the processes' files: each one's label, and its path."""
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
    """Add the probe's histograms to ``registry`` if the probe is on.

    Args:
        registry: the one that /metrics shows; one that has the histograms is left unchanged.

    Returns:
        ``registry``.

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
    """Add the probe's histograms to /metrics where ``expose`` is not called: on stock vLLM.

    Call it before the server makes its routes; in other processes, on a second call, and
    where the overlay is installed it changes nothing.

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

    # The module that makes the routes may have imported the function by name.
    for name, module in list(sys.modules.items()):
        namespace = getattr(module, "__dict__", {})
        if name.startswith("vllm.") and namespace.get("get_prometheus_registry") is original:
            namespace["get_prometheus_registry"] = get_prometheus_registry


#: The registries that have the probe's histograms.
_registries: "weakref.WeakSet[CollectorRegistry]" = weakref.WeakSet()
_lock = threading.Lock()
#: The paths that have been warned of.
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
    """Add the histograms to every registry that combines the metrics of several API servers.

    With several API servers the route of /metrics (prometheus_fastapi_instrumentator's) does
    not show the registry that it was given. It makes a new one for each scrape, and puts
    only a ``prometheus_client.multiprocess.MultiProcessCollector`` into it, which it looks
    up in that module.
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


def _families() -> "dict[str, HistogramMetricFamily]":
    """Return each kind's metric, without values."""
    from prometheus_client.core import HistogramMetricFamily

    return {
        kind: HistogramMetricFamily(
            f"vllm:readiness_{name}_seconds",
            description,
            labels=["process", "owner"] if kind == OWNED else ["process"],
        )
        for kind, (name, description) in METRICS.items()
    }


def _gauges() -> "dict[str, CounterMetricFamily | GaugeMetricFamily]":
    """Return each metric of :mod:`~vllm.v1.readiness.engine.gauges`, without values."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
    return {
        name: kinds[metric.kind](
            f"vllm:readiness_{name}", metric.description, labels=["process", *metric.labels]
        )
        for name, metric in gauges.METRICS.items()
    }


def _warn_once(path: str, reason: Exception | str) -> None:
    """Log, once for each path, that a file or directory is left out."""
    if path not in _warned:
        _warned.add(path)
        if isinstance(reason, Exception):
            reason = f"{type(reason).__name__}: {reason}"
        logger.warning("/metrics leaves out %s: %s", switch.shown(path), reason)
