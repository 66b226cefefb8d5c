"""The table: percentiles of what was recorded, and parts that add up to the whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from probe import table
from probe.__main__ import main
from probe.records import OUTSIDE, PARTS
from support.probes import STEPS, Made, process, row, rows_of, written
from support.sites import REPO

EXAMPLE = [
    row("execute_model", 0, 2_000_000, 1, 1),
    row("fence", 2_500_000, 3_000_000, 1, 2),
    row("sample_tokens", 2_000_000, 3_500_000, 1),
    row("execute_model", 4_000_000, 7_000_000, 2, 1),
]


@given(STEPS)
def test_the_steps_parts_add_up_to_the_steps(made: list[Made]) -> None:
    found = process(rows_of(made))
    rows = {line.name: line for line in table.rows(found)}
    steps = [step for step in found.steps() if step.continuing]
    if not steps:
        assert not any(line.share for line in rows.values())
        return
    parts = [rows[name] for name in (f"  {part}" for part in (*PARTS, OUTSIDE)) if name in rows]
    assert sum(part.total for part in parts) == pytest.approx(rows["step"].total)
    assert rows["step"].calls == len(steps)
    assert rows["step"].total == pytest.approx(sum(step.length for step in steps) / 1e6)
    assert all(step.parts[OUTSIDE] >= 0 for step in steps)
    if rows["step"].total:
        assert sum(part.share or 0 for part in parts) == pytest.approx(1)
        assert rows["step"].share == 1


@given(STEPS)
def test_percentiles_are_numpys(made: list[Made]) -> None:
    found = process(rows_of(made))
    rows = {line.name: line for line in table.rows(found)}
    expected: dict[str, list[int]] = {
        "step": [step.length for step in found.steps() if step.continuing],
        "step that only begins requests": [s.length for s in found.steps() if not s.continuing],
        "readback: started to ready": [s.ended - s.began for s in found.of("readback")],
        "readback: ready to consumed": [s.consumed - s.ended for s in found.of("readback")],
        "between outputs": [s.length for s in found.of("output") if s.continuing],
    }
    for step in filter(lambda step: step.continuing, found.steps()):
        for name, length in step.parts.items():
            expected.setdefault(f"  {name}", []).append(length)
    for span in found.of("fence"):
        expected.setdefault(f"fence: {span.owner}", []).append(span.length)
    for name, values in expected.items():
        assert (name in rows) == bool(values)
        if values:
            percentiles = [np.percentile(values, percent) / 1e6 for percent in (50, 90, 99, 100)]
            assert rows[name].percentiles == pytest.approx(percentiles)
            assert rows[name].calls == len(values)


def test_what_is_in_no_step_is_shown_beside_them() -> None:
    """An engine's core without a worker has no steps; threads of their own are in none."""
    found = process([row("schedule", 0, 1_000_000, 0), row("schedule", 5, 3_000_005, 0)])
    (only,) = table.rows(found)
    assert (only.name, only.calls, only.share) == ("schedule", 2, None)
    assert only.total == 4


def test_the_table_for_people() -> None:
    lines = table.text([process(EXAMPLE, lost=1234)]).splitlines()
    assert lines[0] == "rank0 (pid 7): vLLM 0.22.0, pristine, CPU"
    assert "1,234 records" in lines[1]
    assert lines[2].split() == [
        "count",
        "p50",
        "ms",
        "p90",
        "ms",
        "p99",
        "ms",
        "max",
        "ms",
        "share",
    ]
    (step,) = [line.split() for line in lines if line.strip().startswith("step")]
    assert step == ["step", "1", "4.000", "4.000", "4.000", "4.000", "100.0%"]
    (sampled,) = [line.split() for line in lines if "sample_tokens" in line]
    assert sampled == ["sample_tokens", "1", "1.500", "1.500", "1.500", "1.500", "37.5%"]
    (fence,) = [line.split() for line in lines if "fence" in line]
    assert fence == [*["fence:", "thinking", "budget", "1"], "0.500", "0.500", "0.500", "0.500"]
    assert len({len(line) for line in lines[2:6]}) == 1


def test_the_table_says_which_overlay_it_was() -> None:
    text = table.text([process(EXAMPLE, overlay="0.5.0", digest="ab" * 32)])
    assert "overlay 0.5.0, digest abababababab," in text


def test_nothing_recorded_is_an_empty_table() -> None:
    assert table.rows(process([])) == []
    assert "rank0" in table.text([process([])])


# The program.


def test_the_program_prints_each_processs_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("rank0", "rank1"):
        written(tmp_path / f"file.{label}", EXAMPLE, label=label)
    assert main([str(tmp_path / "file")]) == 0
    printed = capsys.readouterr()
    assert [line[:5] for line in printed.out.splitlines() if "pid" in line] == ["rank0", "rank1"]
    assert printed.err == ""


def test_json_is_the_same_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    trace = tmp_path / "file.json"
    assert main([str(tmp_path / "file"), "--json", "--trace", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {line["name"]: line for line in found["rank0"]["rows"]}
    assert rows["step"]["percentiles"] == [4, 4, 4, 4]
    assert rows["  sample_tokens"]["share"] == 0.375
    assert found["rank0"]["header"]["pid"] == 7
    assert json.loads(trace.read_text())["traceEvents"]
    # The trace lies beside the files, and is none of them.
    assert main([str(tmp_path / "file")]) == 0


def test_files_of_an_earlier_engine_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    written(tmp_path / "file.rank1", EXAMPLE, label="rank1", started_unix_ns=1)
    assert main([str(tmp_path / "file")]) == 0
    printed = capsys.readouterr()
    assert "rank1" not in printed.out
    assert "file.rank1 is of an earlier engine, and left out" in printed.err


def test_files_of_several_hosts_are_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("rank0", "rank1"):
        written(tmp_path / f"file.{label}", EXAMPLE, label=label, boot=f"of {label}")
    assert main([str(tmp_path / "file"), "--trace", str(tmp_path / "trace")]) == 0
    assert "several hosts" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["", ".", "/"])
def test_a_file_that_is_not_named_is_asked_for(
    capsys: pytest.CaptureFixture[str], named: str
) -> None:
    assert main([named]) == 1
    asked = "probe: no file is named. Name what VLLM_READINESS_PROBE held"
    assert capsys.readouterr().err.startswith(asked)


@pytest.mark.parametrize("arguments", [[], ["FILE="]])
def test_make_asks_for_a_file_as_well(arguments: list[str]) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("FILE", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", f"PYTHON3={sys.executable}", "probe", *arguments]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "make probe FILE=FILE" in done.stderr


@pytest.mark.parametrize("more", [[], ["--json"], ["--trace", "trace.json"]])
def test_nothing_to_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    assert main([str(tmp_path / "file"), *more]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("probe: no file")


def test_a_trace_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    assert main([str(tmp_path / "file"), "--trace", str(tmp_path / "none" / "trace")]) == 1
    assert "none" in capsys.readouterr().err


def test_the_program_runs_without_vllm(tmp_path: Path) -> None:
    """On any machine, with nothing installed, from any directory."""
    written(tmp_path / "file.rank0", EXAMPLE)

    def run(*arguments: Any) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-I", "-S", str(REPO / "scripts" / "probe"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    done = run("file", "--trace", "trace.json")
    assert done.returncode == 0, done.stderr
    assert "sample_tokens" in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    assert (tmp_path / "trace.json").exists()
    assert run("nothing").returncode == 1
    assert run().returncode == 2
