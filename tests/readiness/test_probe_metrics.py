"""The probe's histograms: counted in the processes that record, shown by the server."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from readiness.metrics import (
    KINDS,
    METRICS,
    NAMES,
    VALUES,
    histograms,
    of,
    page,
    records,
    registry_of,
    shown,
    write,
)
from support import probes
from vllm.v1.readiness.engine.gauges import Value
from vllm.v1.readiness.watch.probe.histograms import BOUNDS, Histograms, Series
from vllm.v1.readiness.watch.probe.metrics import ProbeCollector


@pytest.fixture
def file(metrics_file: Path) -> Path:
    """The value of VLLM_READINESS_PROBE."""
    return metrics_file


near_a_bound = st.builds(
    lambda bound, off: bound + off, st.sampled_from(BOUNDS), st.integers(-2, 2)
)
lasting = st.one_of(near_a_bound, st.integers(-2, 2), st.integers(0, 3 * 10**10))
recorded = st.tuples(st.integers(-1, len(KINDS)), lasting, st.integers(-1, len(NAMES)))


@given(st.lists(recorded, max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_counts_are_those_of_numpy(rows: list[tuple[int, int, int]], cuts: list[int]) -> None:
    """However the records are cut into updates; unknown kinds and unended records are not."""
    counted = Histograms(KINDS)
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for start, end in pairwise(edges):
        counted.update(records(*rows[start:end]), NAMES)

    expected: dict[tuple[str, str | None], list[int]] = {}
    for kind, lasted, owner in rows:
        pause = KINDS.index("output") == kind and owner <= 0
        if kind in range(len(KINDS) - 1) and lasted >= 0 and not pause:
            name = NAMES[owner] if owner in range(len(NAMES)) else "unknown"
            key = (KINDS[kind], name if KINDS[kind] == "fence" else None)
            expected.setdefault(key, []).append(lasted)
    assert counted.series.keys() == expected.keys()
    for key, values in expected.items():
        # numpy's buckets hold their lower bound, Prometheus's their upper one: mirrored.
        edges_ = np.array([-(10**12), *(-bound for bound in reversed(BOUNDS)), 1])
        counts = np.histogram([-value for value in values], edges_)[0][::-1]
        assert counted.series[key].counts == counts.tolist()
        assert counted.series[key].total == sum(values)


@given(probes.STEPS)
def test_intervals_between_outputs_are_those_of_the_table(steps: list[probes.DrawnStep]) -> None:
    """A step that continues no request comes after a pause, and neither counts that."""
    rows = probes.rows_of(steps)
    counted = Histograms(KINDS)
    counted.update(np.array(rows, dtype=np.int64).reshape(-1, 6), probes.OWNERS)
    intervals = probes.process(rows).intervals()
    series = counted.series.get(("output", None), Series([], 0))
    assert (sum(series.counts), series.total) == (len(intervals), sum(intervals))


def test_workers_and_a_core_are_shown_side_by_side(file: Path) -> None:
    steps = ((0, 1_000, 0), (0, 1_001, 0), (0, 20_000_000_000, 0))
    write(file, "rank0", *steps, (3, 5_000, 1), (5, 4_000_000, 1))
    write(file, "dp1-rank1", (0, 300, 0), (3, 70, 0), (3, 80, 7))
    write(file, "engine0", (6, 1, 0), (7, 2, 0), (8, 3, 0))
    samples = page(file)
    buckets = {
        le: count
        for (name, process, _, le), count in samples.items()
        if (name, process) == ("execute_model_seconds_bucket", "rank0")
    }
    assert [buckets[le] for le in ("1e-06", "2.5e-06", "10.0", "+Inf")] == [1, 2, 2, 3]
    assert samples["execute_model_seconds_sum", "rank0", None, ""] == 20.000002001
    assert samples["fence_seconds_sum", "rank0", "thinking-budget", ""] == 5e-6
    assert samples["output_interval_seconds_bucket", "rank0", None, "0.005"] == 1
    assert samples["output_interval_seconds_bucket", "rank0", None, "0.0025"] == 0
    assert {key[:3]: n for key, n in samples.items() if key[0].endswith("_count")} == {
        ("execute_model_seconds_count", "rank0", None): 3,
        ("execute_model_seconds_count", "dp1-rank1", None): 1,
        ("fence_seconds_count", "rank0", "thinking-budget"): 1,
        ("fence_seconds_count", "dp1-rank1", "history"): 1,
        ("fence_seconds_count", "dp1-rank1", "unknown"): 1,
        ("output_interval_seconds_count", "rank0", None): 1,
        ("schedule_seconds_count", "engine0", None): 1,
        ("update_from_output_seconds_count", "engine0", None): 1,
    }


def test_gauges_are_shown_for_each_process(file: Path) -> None:
    taken = [
        Value("slots", ("penalties",), 3),
        Value("pinned_bytes", ("readback",), 1 << 40),
    ]
    for label in ("rank0", "dp1-rank1"):
        histograms((0, 1, 0)).write(str(of(file, label)), taken)
    gauges = {key: value for key, value in page(file).items() if not key[0].startswith("execute")}
    assert gauges == {
        key: value
        for label in ("rank0", "dp1-rank1")
        for key, value in (
            (("slots", label, "penalties", ""), 3),
            (("pinned_bytes", label, "readback", ""), 1 << 40),
        )
    }


def test_each_scrape_shows_the_files_as_they_are(file: Path) -> None:
    registry = registry_of(file)
    assert shown(registry) == {}
    counted = write(file, "rank0", (1, 5, 0))
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 1
    counted.update(records((1, 5, 0), (1, 5, 0)), NAMES)
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 1
    counted.write(str(of(file, "rank0")))
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 3
    counted.remove()
    assert shown(registry) == {}
    assert list(file.parent.iterdir()) == []
    counted.remove()


def test_a_core_that_turns_out_to_run_a_worker_is_shown_once(file: Path) -> None:
    counted = write(file, "engine0", (6, 5, 0))
    counted.write(str(of(file, "rank0")))
    assert [path.name for path in file.parent.iterdir()] == [of(file, "rank0").name]
    assert {process for _, process, _, _ in page(file)} == {"rank0"}


def test_the_names_are_known_before_anything_is_recorded(file: Path) -> None:
    registry = registry_of(file)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(ProbeCollector(str(file)))
    lines = generate_latest(registry).decode().splitlines()
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == METRICS | VALUES


def test_vllms_own_snapshot_reads_the_histograms(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm.get_metrics() goes through every metric whose name begins with vllm:."""
    from vllm.v1.metrics import reader

    write(file, "rank0", (0, 1, 0), (3, 5, 1))
    monkeypatch.setattr(reader, "REGISTRY", registry_of(file))
    counts = {
        (metric.name, metric.labels.get("owner")): metric.count
        for metric in reader.get_metrics_snapshot()
    }
    assert counts == {
        ("vllm:readiness_execute_model_seconds", None): 1,
        ("vllm:readiness_fence_seconds", "thinking-budget"): 1,
    }
