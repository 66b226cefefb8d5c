"""The description of the machine and the versions, with which every run begins."""

import time
from pathlib import Path

import pytest
from bench.compare import machine
from overlay import pin
from support.sites import REPO


def test_a_described_run_says_what_is_needed_to_judge_and_repeat_it() -> None:
    run = machine.describe("table", time.monotonic() - 2, {"stock": "0" * 64}, device="CPU")
    assert (run["schema"], run["kind"], run["digests"]) == (1, "table", {"stock": "0" * 64})
    assert 2 <= run["seconds"] < 60
    assert list(run["machine"]) == ["device", "cpu", "cores", "memory GiB", "driver", "system"]
    assert (run["machine"]["device"], run["machine"]["driver"]) == ("CPU", None)
    assert run["machine"]["cores"] > 0
    pinned = pin.loads((REPO / pin.NAME).read_text())
    assert run["versions"]["vllm"] == pinned.release
    assert f"overlay = {run['versions']['overlay']}\n" in (REPO / pin.NAME).read_text()
    assert run["versions"]["torch"].startswith("2.")


def test_an_installation_s_version_goes_before_this_pythons(tmp_path: Path) -> None:
    info = tmp_path / "vllm-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n")
    assert machine.versions(tmp_path)["vllm"] == "9.9.9"
    assert machine.versions(tmp_path)["torch"] == machine.versions()["torch"]


@pytest.mark.parametrize(
    ("visible", "answer", "device", "driver"),
    [
        (
            None,
            "NVIDIA H100 80GB HBM3, 570.1\nNVIDIA T4, 570.1\n",
            "NVIDIA H100 80GB HBM3",
            "570.1",
        ),
        ("1,0", "NVIDIA T4, 570.1\n", "NVIDIA T4", "570.1"),
        ("", "NVIDIA T4, 570.1\n", "CPU", None),
    ],
)
def test_the_first_visible_gpu_is_the_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    answer: str,
    device: str,
    driver: str | None,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat <<E\n{answer}E\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    description = machine.machine()
    assert (description["device"], description["driver"]) == (device, driver)
    asked = tmp_path / "asked"
    assert ("--id 1" in asked.read_text() if asked.exists() else False) == (visible == "1,0")


def test_what_a_child_is_given_goes_before_what_it_inherits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    description = machine.settings({"VLLM_LOGGING_LEVEL": "INFO"})
    assert description["VLLM_LOGGING_LEVEL"] == "INFO"
    assert description["OMP_NUM_THREADS"] == "3"
    assert "PATH" not in description
