"""The description of the machine and the versions, with which every run begins."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.harness import machine
from overlay import pin
from support.sites import REPO, UPSTREAM


def describe(site: Path, device: str) -> dict[str, Any]:
    views: Any = SimpleNamespace(site=site, digests={"stock": "0" * 64}, python_version="3.9.9")
    return machine.describe(time.monotonic() - 2, device, views)


def test_a_described_run_says_what_is_needed_to_judge_and_repeat_it(tmp_path: Path) -> None:
    run = describe(UPSTREAM, "CPU")
    assert run["digests"] == {"stock": "0" * 64}
    assert 2 <= run["seconds"] < 60
    assert list(run["machine"]) == ["device", "cpu", "cores", "memory GiB", "driver", "system"]
    assert (run["machine"]["device"], run["machine"]["driver"]) == ("CPU", None)
    assert run["machine"]["cores"] > 0
    pinned = pin.loads((REPO / pin.NAME).read_text())
    assert run["versions"]["vllm"] == pinned.release
    assert f"overlay = {run['versions']['overlay']}\n" in (REPO / pin.NAME).read_text()
    assert run["versions"]["torch"].startswith("2.")
    assert run["versions"]["python"] == "3.9.9"
    # An installation's versions go before this Python's.
    info = tmp_path / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
    assert describe(tmp_path, "CPU")["versions"] == run["versions"] | {"vllm": "9.9.9"}


def test_a_gpu_s_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '570.1\\n570.1\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    described = describe(UPSTREAM, "NVIDIA T4")["machine"]
    assert (described["device"], described["driver"]) == ("NVIDIA T4", "570.1")


def test_what_a_child_is_given_goes_before_what_it_inherits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    description = machine.settings({"VLLM_LOGGING_LEVEL": "INFO"})
    assert description["VLLM_LOGGING_LEVEL"] == "INFO"
    assert description["OMP_NUM_THREADS"] == "3"
    assert "PATH" not in description
