"""Histograms of the probe with known values, and the page that shows them."""

from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.readiness.watch.probe.histograms import Histograms
from vllm.v1.readiness.watch.probe.metrics import ProbeCollector

KINDS = (
    *("execute_model", "sample_tokens", "get_output", "fence"),
    *("readback", "output", "schedule", "update_from_output", "of a later version"),
)
NAMES = ["history", "thinking-budget"]
PREFIX = "vllm:readiness_"
METRICS = {
    f"{PREFIX}{name}_seconds"
    for name in (
        *("execute_model", "sample_tokens", "get_output", "fence"),
        *("readback", "output_interval", "schedule", "update_from_output"),
    )
}


#: The probe's gauges.
VALUES = {f"{PREFIX}{name}" for name in ("slots", "slot_bytes", "pinned_bytes")}
#: The metrics that are always on, as Prometheus's parser names them.
EXPORTED = {f"{PREFIX}info", f"{PREFIX}fallbacks"}


def records(*rows: tuple[int, int, int]) -> Any:
    """Return records of (kind, nanoseconds, owner), one after another; int64 [n, 6]."""
    began = 10**15
    listed = []
    for step, (kind, lasted, owner) in enumerate(rows):
        listed.append((kind, began, began + lasted, step, owner, 0))
        began += 7919
    return np.array(listed, dtype=np.int64).reshape(-1, 6)


def histograms(*rows: tuple[int, int, int]) -> Histograms:
    counted = Histograms(KINDS)
    counted.update(records(*rows), NAMES)
    return counted


Shown = dict[tuple[str, str, str | None, str], float]


def shown(registry: CollectorRegistry) -> Shown:
    """Scrape, and parse the page: (sample, process, owner or feature, le) to value."""
    samples: Shown = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.name in METRICS | VALUES
        assert family.type == ("gauge" if family.name in VALUES else "histogram")
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            key = (
                sample.name.removeprefix(PREFIX),
                labels.pop("process"),
                labels.pop("owner", None) or labels.pop("feature", None),
                labels.pop("le", ""),
            )
            assert not labels
            assert key not in samples, "one sample twice: no server would take the page"
            samples[key] = sample.value
    return samples


def of(file: Path, label: str) -> Path:
    return Path(f"{file}.{label}.metrics")


def write(file: Path, label: str = "rank0", *rows: tuple[int, int, int]) -> Histograms:
    """Write the histograms of a process; of one step if no rows are given."""
    counted = histograms(*rows or [(0, 1, 0)])
    counted.write(str(of(file, label)))
    return counted


def registry_of(file: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ProbeCollector(str(file)))
    return registry


def page(file: Path) -> Shown:
    """Scrape a new registry."""
    return shown(registry_of(file))
