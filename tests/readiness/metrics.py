"""The names and the values of the overlay's metrics."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.readiness.watch.probe.histograms import ProbeCollector

PREFIX = "vllm:readiness_"
#: The probe's histograms.
METRICS = {
    f"{PREFIX}{name}_seconds"
    for name in (
        *("execute_model", "sample_tokens", "get_output", "fence"),
        *("device", "output_interval", "schedule", "update_from_output"),
    )
}
#: The probe's counter and gauges.
VALUES = {f"{PREFIX}{name}" for name in ("tokens", "slots", "slot_bytes", "pinned_bytes")}
#: The metrics that are always on, as Prometheus's parser names them.
EXPORTED = {f"{PREFIX}info", f"{PREFIX}fallbacks"}

#: Sample, process, owner or part or feature, and bound, to a value.
Shown = dict[tuple[str, str, str, str], float]


def text() -> str:
    """Return the page of a new registry with the probe's metrics."""
    registry = CollectorRegistry()
    registry.register(ProbeCollector())
    return generate_latest(registry).decode()


def shown() -> Shown:
    """Scrape, and parse the page."""
    samples: Shown = {}
    for family in text_string_to_metric_families(text()):
        assert family.name in METRICS | VALUES
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            name, process = sample.name.removeprefix(PREFIX), labels.pop("process")
            bound = labels.pop("le", "")
            (detail,) = labels.values() or ("",)
            assert (name, process, detail, bound) not in samples
            samples[name, process, detail, bound] = sample.value
    return samples


def counts() -> dict[tuple[str, str, str], float]:
    """Return the number of durations by histogram, process, and owner or part."""
    ending = "_seconds_count"
    return {
        (name.removesuffix(ending), process, detail): value
        for (name, process, detail, _), value in shown().items()
        if name.endswith(ending)
    }
