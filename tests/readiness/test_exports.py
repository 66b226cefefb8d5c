"""Metrics that are always on: exported by an engine's processes, shown by the API server."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from readiness.alone import run_alone
from readiness.metrics import EXPORTED, METRICS, PREFIX
from vllm.v1.readiness import registry as words
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.watch import exports, metrics

#: Begins to export in a process of its own, where vLLM's modules are not needed.
BEGIN = """
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.watch import exports
exports.begin(new={new})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of exports, in which this process has a new file."""
    monkeypatch.setenv(switch.EXPORTS, str(tmp_path / "exports"))
    (tmp_path / "exports").mkdir()
    monkeypatch.setattr(exports, "_exports", exports.Exports())
    monkeypatch.setattr(gauges, "listeners", [])
    monkeypatch.setattr(gauges, "_fallbacks", {})
    exports.begin(new=False)
    yield tmp_path / "exports"


def page() -> dict[tuple[str, str], float]:
    """Scrape a new registry: fallbacks by feature and reason, infos by their runner."""
    found: dict[tuple[str, str], float] = {}
    text = generate_latest(metrics.expose(CollectorRegistry())).decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples if family.name in EXPORTED else ():
            labels = sample.labels
            key = (labels.get("feature", "info"), labels.get("reason", labels.get("runner", "")))
            assert key not in found
            found[key] = sample.value
    return found


def test_fallbacks_of_all_processes_are_summed(folder: Path) -> None:
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    gauges.fall_back("penalties", gauges.NO_SLOT)
    run_alone(
        BEGIN.format(new=False)
        + "gauges.fall_back('seeds', gauges.OTHER_BITS)\n"
        + "if not (child := os.fork()):\n"
        + "    gauges.fall_back('bad-words', gauges.NO_ROOM)\n    os._exit(0)\n"
        + "os.waitpid(child, 0)\n"
    )
    expected = {("seeds", gauges.OTHER_BITS): 3, ("penalties", gauges.NO_SLOT): 1}
    expected["bad-words", gauges.NO_ROOM] = 1
    # The forked process also exports the count that it inherited, once it changes.
    assert page() == {**expected, ("info", "unknown"): 1}
    assert len(list(folder.iterdir())) == 3


def test_info_is_that_of_the_runner(folder: Path) -> None:
    exports.export_info(metrics.info("V1", words.ALL - {"seeds"}))
    exports.export_info(metrics.info("V1", words.ALL - {"seeds"}))
    text = generate_latest(metrics.expose(CollectorRegistry())).decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{PREFIX}info{{")]
    assert 'runner="V1"' in line
    assert 'off="seeds"' in line
    assert "penalties" in line


def test_damaged_files_are_skipped(folder: Path) -> None:
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    (folder / "1.db").write_bytes(b"\xff" * 64)
    (folder / "2.db").write_bytes(b"")
    (folder / "3.db").mkdir()
    assert page() == {("seeds", gauges.OTHER_BITS): 1, ("info", "unknown"): 1}


def test_a_step_is_not_ended_by_a_full_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(3):
        gauges.fall_back("seeds", gauges.OTHER_BITS)
    assert page() == {("info", "unknown"): 1}
    full.assert_called_once()


def test_the_disk_space_of_a_file_is_allocated_before_it_is_mapped(folder: Path) -> None:
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    (file,) = folder.iterdir()
    size = file.stat().st_size
    assert file.stat().st_blocks * 512 >= size > 0
    for number in range(size // 16):
        gauges.fall_back(f"feature {number}", gauges.NO_ROOM)
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    assert file.stat().st_size == size
    assert page()["seeds", gauges.OTHER_BITS] == 2


def test_nothing_is_exported_without_the_directory(folder: Path) -> None:
    """On a host without the first process."""
    folder.rmdir()
    gauges.fall_back("seeds", gauges.OTHER_BITS)
    assert page() == {("info", "unknown"): 1}
    assert not folder.exists()


def test_the_first_process_names_and_removes_the_directory(tmp_path: Path) -> None:
    program = (
        "gauges.fall_back('seeds', gauges.OTHER_BITS)\n"
        "folder = os.environ[switch.EXPORTS]\n"
        "print(folder, len(os.listdir(folder)), oct(os.stat(folder).st_mode & 0o777))\n"
    )
    before = {switch.EXPORTS: str(tmp_path / "of the parent")}
    (tmp_path / "of the parent").mkdir(mode=0o700)
    name, number, mode = run_alone(BEGIN.format(new=True) + program, **before).rsplit(" ", 2)
    assert (number, mode) == ("1", "0o700")
    assert name != before[switch.EXPORTS]
    assert not Path(name).exists()
    name, *_ = run_alone(BEGIN.format(new=False) + program, **before).rsplit(" ", 2)
    assert name == before[switch.EXPORTS]
    assert Path(name).exists()


def test_a_registry_has_each_collector_once(
    folder: Path,
    caplog_vllm: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(switch.PROBE, "1")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = CollectorRegistry()
    for _ in range(2):
        assert metrics.expose(registry) is registry
    names = {name for names in registry._collector_to_names.values() for name in names}
    assert len(registry._collector_to_names) == 2
    assert {f"{PREFIX}info", *METRICS} <= names
    assert caplog_vllm.messages == []
    monkeypatch.delenv(switch.PROBE)
    without = CollectorRegistry()
    metrics.expose(without)
    assert len(without._collector_to_names) == 1
