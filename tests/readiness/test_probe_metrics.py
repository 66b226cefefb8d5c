"""The probe's histograms: counted in the processes that record, shown by the server."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support import probes
from vllm.v1.readiness import probe, switch
from vllm.v1.readiness.probe import metrics
from vllm.v1.readiness.probe.histograms import BOUNDS, Histograms, Series
from vllm.v1.readiness.probe.metrics import ProbeCollector

KINDS = (
    *("execute_model", "sample_tokens", "get_output", "fence"),
    *("readback", "output", "schedule", "update_from_output", "of a later version"),
)
NAMES = ["history", "thinking-budget"]
PACKAGE = str(Path(switch.__file__).parents[2])
PREFIX = "vllm:readiness_"
METRICS = {
    f"{PREFIX}{name}_seconds"
    for name in (
        *("execute_model", "sample_tokens", "get_output", "fence"),
        *("readback", "output_interval", "schedule", "update_from_output"),
    )
}


def records(*rows: tuple[int, int, int]) -> Any:
    """Records of (kind, nanoseconds, owner), one after another; int64 [n, 6]."""
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
    """The exposition, parsed: (sample without prefix, process, owner, le) to value."""
    found: Shown = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        if not family.name.startswith(PREFIX):
            continue
        assert family.type == "histogram"
        assert family.name in METRICS
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            key = (
                sample.name.removeprefix(PREFIX),
                labels.pop("process"),
                labels.pop("owner", None),
                labels.pop("le", ""),
            )
            assert not labels
            assert key not in found, "one sample twice: no server would take the page"
            found[key] = sample.value
    return found


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What VLLM_READINESS_PROBE names; nothing has been warned of."""
    file = tmp_path / "a [probe]*"
    monkeypatch.setenv(switch.PROBE, str(file))
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(metrics, "_warned", set())
    return file


@pytest.fixture
def warned() -> Iterator[Callable[[], list[str]]]:
    """The warnings that have been logged."""
    with probes.logged(probe) as sentences:
        yield sentences


def of(file: Path, label: str) -> Path:
    return Path(f"{file}.{label}.metrics")


def registry_of(file: Path) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ProbeCollector(str(file)))
    return registry


near_a_bound = st.builds(
    lambda bound, off: bound + off, st.sampled_from(BOUNDS), st.integers(-2, 2)
)
lasting = st.one_of(near_a_bound, st.integers(-2, 2), st.integers(0, 3 * 10**10))
recorded = st.tuples(st.integers(-1, len(KINDS)), lasting, st.integers(-1, len(NAMES)))


@given(st.lists(recorded, max_size=60), st.lists(st.integers(0, 60), max_size=4))
def test_what_is_counted_is_what_numpy_counts(
    rows: list[tuple[int, int, int]], cuts: list[int]
) -> None:
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
def test_intervals_between_outputs_are_those_of_the_table(made: list[probes.DrawnStep]) -> None:
    """A step that continues no request comes after a pause, and neither counts that."""
    rows = probes.rows_of(made)
    counted = Histograms(KINDS)
    counted.update(np.array(rows, dtype=np.int64).reshape(-1, 6), probes.OWNERS)
    intervals = probes.process(rows).intervals()
    found = counted.series.get(("output", None), Series([], 0))
    assert (sum(found.counts), found.total) == (len(intervals), sum(intervals))


def test_two_workers_and_a_core_are_shown_side_by_side(file: Path) -> None:
    histograms(
        (0, 1_000, 0),
        (0, 1_001, 0),
        (0, 20_000_000_000, 0),
        (3, 5_000, 1),
        (5, 4_000_000, 1),
    ).write(str(of(file, "rank0")))
    histograms((0, 300, 0), (3, 70, 0), (3, 80, 7)).write(str(of(file, "dp1-rank1")))
    histograms((6, 1, 0), (7, 2, 0), (8, 3, 0)).write(str(of(file, "engine0")))
    page = shown(registry_of(file))

    assert page["execute_model_seconds_bucket", "rank0", None, "1e-06"] == 1
    assert page["execute_model_seconds_bucket", "rank0", None, "2.5e-06"] == 2
    assert page["execute_model_seconds_bucket", "rank0", None, "10.0"] == 2
    assert page["execute_model_seconds_bucket", "rank0", None, "+Inf"] == 3
    assert page["execute_model_seconds_count", "rank0", None, ""] == 3
    assert page["execute_model_seconds_sum", "rank0", None, ""] == 20.000002001
    assert page["execute_model_seconds_count", "dp1-rank1", None, ""] == 1
    assert page["fence_seconds_sum", "rank0", "thinking-budget", ""] == 5e-6
    assert page["fence_seconds_count", "dp1-rank1", "history", ""] == 1
    assert page["fence_seconds_count", "dp1-rank1", "unknown", ""] == 1
    assert page["output_interval_seconds_bucket", "rank0", None, "0.005"] == 1
    assert page["output_interval_seconds_bucket", "rank0", None, "0.0025"] == 0
    counts = {key[:3] for key in page if key[0].endswith("_count")}
    assert counts == {
        ("execute_model_seconds_count", "rank0", None),
        ("execute_model_seconds_count", "dp1-rank1", None),
        ("fence_seconds_count", "rank0", "thinking-budget"),
        ("fence_seconds_count", "dp1-rank1", "history"),
        ("fence_seconds_count", "dp1-rank1", "unknown"),
        ("output_interval_seconds_count", "rank0", None),
        ("schedule_seconds_count", "engine0", None),
        ("update_from_output_seconds_count", "engine0", None),
    }


def test_each_scrape_shows_what_has_been_written_by_then(file: Path) -> None:
    registry = registry_of(file)
    assert shown(registry) == {}
    counted = histograms((1, 5, 0))
    counted.write(str(of(file, "rank0")))
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 1
    counted.update(records((1, 5, 0), (1, 5, 0)), NAMES)
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 1
    counted.write(str(of(file, "rank0")))
    assert shown(registry)["sample_tokens_seconds_count", "rank0", None, ""] == 3
    counted.remove()
    assert shown(registry) == {}
    assert list(file.parent.iterdir()) == []
    counted.remove()


def test_a_process_that_turns_out_to_run_a_worker_is_shown_under_one_name(file: Path) -> None:
    counted = histograms((6, 5, 0))
    counted.write(str(of(file, "engine0")))
    counted.write(str(of(file, "rank0")))
    assert [path.name for path in file.parent.iterdir()] == [of(file, "rank0").name]
    assert {process for _, process, _, _ in shown(registry_of(file))} == {"rank0"}


def test_the_names_are_known_before_anything_is_recorded(file: Path) -> None:
    registry = registry_of(file)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(ProbeCollector(str(file)))
    page = generate_latest(registry).decode()
    assert {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")} == METRICS


def test_a_file_is_replaced_all_at_once(file: Path) -> None:
    """A reader beside the writer finds whole histograms, each time no fewer than before."""
    counted = histograms(*[(kind, 5, 0) for kind in range(8)])
    counted.write(str(of(file, "rank0")))
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            counted.update(records(*[(kind, 5, 0) for kind in range(8)]), NAMES)
            counted.write(str(of(file, "rank0")))

    writer = threading.Thread(target=write)
    writer.start()
    registry, last = registry_of(file), 0.0
    try:
        for _ in range(30):
            page = shown(registry)
            (count,) = {value for key, value in page.items() if key[0].endswith("_count")}
            assert count >= last
            last = count
    finally:
        done.set()
        writer.join()
    assert [path.name for path in file.parent.iterdir()] == [of(file, "rank0").name]


#: Makes our modules importable without vLLM's, which take seconds.
ALONE = f"""
import logging, sys, time, types
for name, path in (("vllm", {PACKAGE!r}), ("vllm.v1", {PACKAGE + "/v1"!r}), ("vllm.logger", "")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
sys.modules["vllm.logger"].init_logger = logging.getLogger
"""


def test_of_a_process_that_has_ended_nothing_is_shown(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    """Killed, its file stays; not waited for, it is still in the table of processes."""
    program = f"""{ALONE}
from vllm.v1.readiness.probe.histograms import Histograms
import numpy as np
counted = Histograms({KINDS!r})
counted.update(np.array([[0, 1, 2, 0, 0, 0]]), [])
counted.write({str(of(file, "rank0"))!r})
print(flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        alive = shown(registry_of(file))
        writer.kill()
        assert ("execute_model_seconds_count", "rank0", None, "") in alive
        os.waitid(os.P_PID, writer.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{writer.pid}").exists()
        assert shown(registry_of(file)) == {}
    assert not Path(f"/proc/{writer.pid}").exists()
    assert of(file, "rank0").exists()
    assert shown(registry_of(file)) == {}
    assert warned() == []


def rewritten(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_process_that_got_the_number_of_another_is_not_taken_for_it(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    """Nor one of another boot or host, nor a file that does not say whose it is."""
    path = of(file, "rank0")
    histograms((0, 1, 0)).write(str(path))
    assert shown(registry_of(file))
    boot, pid, began = json.loads(path.read_text())["instance"].split()
    assert int(pid) == os.getpid()
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    for instance in (f"{boot} {pid} {int(began) - 1}", f"{'0' * 36} {pid} {began}", None):
        rewritten(path, instance=instance)
        assert shown(registry_of(file)) == {}
    rewritten(path, instance=None, pid=2**22 + 1)
    assert shown(registry_of(file)) == {}
    assert warned() == []


def test_files_that_only_look_like_ours_are_left_alone(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    """Those of another server's probe, copies, temporary ones, and the records."""
    path = of(file, "rank0")
    histograms((0, 1, 0)).write(str(path))
    expected = shown(registry_of(file))
    content = path.read_bytes()
    others = [f"{file}.other.rank0.metrics", f"{file}rank0.metrics"]
    others += [str(file.with_name(f"{'x' * len(file.name)}.rank0.metrics"))]
    others += [f"{file}.rank0", f"{file}.rank0.metrics.77.new", f"{file}.rank0.old-one"]
    for name in others:
        Path(name).write_bytes(content)
    of(file, "a directory").mkdir()
    os.mkfifo(of(file, "a pipe"))
    assert shown(registry_of(file)) == expected
    assert warned() == []


SERIES = {"kind": "execute_model", "owner": None, "counts": [1] * 23, "total": 23}
GARBAGE: dict[str, Any] = {
    "nothing": b"",
    "all but the end": lambda whole: whole[:-1],
    "bytes": bytes(range(256)) * 40,
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "huge": lambda whole: b" " * (1 << 21) + whole,
    "another form": {"form": 2},
    "other bounds": {"bounds": [1, 2, 3]},
    "no process": {"pid": "../self"},
    "no series": {"series": None},
    "an unknown kind": {"series": [SERIES | {"kind": "lunch"}]},
    "an owner too many": {"series": [SERIES | {"owner": "history"}]},
    "an owner too few": {"series": [SERIES | {"kind": "fence"}]},
    "half a character": {"series": [SERIES | {"kind": "fence", "owner": "\ud800"}]},
    "a bucket too few": {"series": [SERIES | {"counts": [1] * 22}]},
    "counts that are text": {"series": [SERIES | {"counts": "1" * 23}]},
    "a broken count": {"series": [SERIES | {"counts": [1] * 22 + [0.5]}]},
    "a sum beyond floats": {"series": [SERIES | {"total": 10**400}]},
    "a series twice": {"series": [SERIES, SERIES]},
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_left_out_and_logged_once(
    name: str, file: Path, warned: Callable[[], list[str]]
) -> None:
    histograms((0, 1, 0)).write(str(of(file, "rank0")))
    expected = shown(registry_of(file))
    path = of(file, "rank1")
    histograms((0, 1, 0)).write(str(path))
    assert shown(registry_of(file)) != expected
    garbage = GARBAGE[name]
    if isinstance(garbage, dict):
        rewritten(path, **garbage)
    else:
        path.write_bytes(garbage if isinstance(garbage, bytes) else garbage(path.read_bytes()))
    for _ in range(3):
        assert shown(registry_of(file)) == expected
    assert len(warned()) == 1
    assert str(path) in warned()[0]


def test_a_name_that_is_no_text_is_left_out(file: Path, warned: Callable[[], list[str]]) -> None:
    odd = os.fsdecode(os.fsencode(f"{file}.rank") + b"\xff.metrics")
    histograms((0, 1, 0)).write(odd)
    assert Path(odd).exists()
    assert shown(registry_of(file)) == {}
    assert len(warned()) == 1
    assert warned()[0].startswith(f"/metrics leaves out {file}.rank\\xff.metrics: ")
    warned()[0].encode()  # a log takes it


@given(data=st.data())
def test_no_damage_to_a_file_ends_a_scrape(data: st.DataObject, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("damage") / "probe"
    path = of(file, "rank0")
    histograms((0, 1, 0), (3, 5, 1)).write(str(path))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=3))
    path.write_bytes(content)
    shown(registry_of(file))


def test_a_file_that_goes_between_the_look_and_the_reading_is_not_missed(
    file: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    histograms((0, 1, 0)).write(str(of(file, "rank0")))
    gone = [("rank1", str(of(file, "rank1")))]
    found = ProbeCollector._files
    monkeypatch.setattr(ProbeCollector, "_files", lambda self: gone + found(self))
    assert ("execute_model_seconds_count", "rank0", None, "") in shown(registry_of(file))
    assert warned() == []


def test_a_directory_that_is_gone_is_logged_once(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    counted = histograms((0, 1, 0))
    gone = file.parent / "gone" / "probe"
    for _ in range(3):
        assert shown(registry_of(gone)) == {}
        counted.write(str(of(gone, "rank0")))
    assert [line.partition(":")[0] for line in warned()] == [
        f"/metrics leaves out {gone.parent}",
        f"/metrics will lack histograms, because {of(gone, 'rank0')} cannot be written",
    ]
    counted.write(str(of(file, "rank0")))
    assert shown(registry_of(file))


def test_what_cannot_be_put_in_place_is_not_left_lying_about(
    file: Path, warned: Callable[[], list[str]]
) -> None:
    of(file, "rank0").mkdir()
    histograms((0, 1, 0)).write(str(of(file, "rank0")))
    assert list(file.parent.iterdir()) == [of(file, "rank0")]
    assert len(warned()) == 1


def test_a_registry_carries_the_probe_once_or_not_at_all(
    file: Path, warned: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    histograms((0, 1, 0)).write(str(of(file, "rank0")))
    registry, other, taken = CollectorRegistry(), CollectorRegistry(), registry_of(file)
    for each in (registry, registry, other):
        assert metrics.expose(each) is each
    assert shown(registry) == shown(other) != {}
    assert warned() == []
    assert metrics.expose(taken) is taken
    assert shown(taken) == shown(registry)
    assert warned() == [f"/metrics leaves out {file}: other metrics have the same names"]
    monkeypatch.delenv(switch.PROBE)
    untouched = CollectorRegistry()
    assert metrics.expose(untouched) is untouched
    assert list(untouched._collector_to_names) == []


def test_doing_it_again_changes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import multiprocess
    from vllm.v1.metrics import prometheus

    places: tuple[tuple[Any, str], ...] = (
        (prometheus, "get_prometheus_registry"),
        (multiprocess, "MultiProcessCollector"),
    )
    for place, name in places:
        monkeypatch.setattr(place, name, getattr(place, name))
    before = [getattr(place, name) for place, name in places]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def again() -> list[Any]:
        metrics.install()
        registry = prometheus.get_prometheus_registry()
        assert len(registry._collector_to_names) == 2
        return [getattr(place, name) for place, name in places]

    first = again()
    assert all(now is not then for now, then in zip(first, before, strict=True))
    assert again() == again() == first


def test_a_misspelt_file_is_refused_before_anything_is_shown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.PROBE, str(file / "nowhere"))
    for function in (metrics.install, lambda: metrics.expose(CollectorRegistry())):
        with pytest.raises(switch.PathError, match="there is no directory"):
            function()


def test_vllms_own_snapshot_reads_the_histograms(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llm.get_metrics() goes through every metric whose name begins with vllm:."""
    from vllm.v1.metrics import reader

    histograms((0, 1, 0), (3, 5, 1)).write(str(of(file, "rank0")))
    monkeypatch.setattr(reader, "REGISTRY", registry_of(file))
    counts = {
        (metric.name, metric.labels.get("owner")): metric.count
        for metric in reader.get_metrics_snapshot()
    }
    assert counts == {
        ("vllm:readiness_execute_model_seconds", None): 1,
        ("vllm:readiness_fence_seconds", "thinking-budget"): 1,
    }


def test_importing_it_costs_and_touches_nothing(tmp_path: Path) -> None:
    """The patched module of vLLM imports it whether or not there is a probe."""
    program = f"""{ALONE}
import numpy, json
before = set(sys.modules)
events = []
sys.addaudithook(lambda event, _: events.append(event))
import vllm.v1.readiness.probe.metrics as ours
import threading
registry = object()
assert ours.expose(registry) is registry
ours.install()
kinds = ("subprocess", "os.", "socket", "shutil", "tempfile", "_thread", "threading", "signal")
print(json.dumps([
    sorted(name for name in set(sys.modules) - before if name not in sys.stdlib_module_names),
    [e for e in events if e.startswith(kinds) and not e.startswith("os.listdir")],
    threading.active_count(),
]))
"""
    env = {key: value for key, value in os.environ.items() if key != switch.PROBE}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=tmp_path,
    )
    modules, events, threads = json.loads(done.stdout)
    names = ("", ".features", ".probe", ".probe.histograms", ".probe.metrics", ".switch")
    assert modules == [f"vllm.v1.readiness{name}" for name in names]
    assert events == []
    assert threads == 1
    assert list(tmp_path.iterdir()) == []
