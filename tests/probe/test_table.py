"""The table: percentiles of what was recorded, and parts that add up to the whole."""

import json
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
from support.checkouts import make
from support.probes import STEPS, DrawnStep, process, row, rows_of, written
from support.sites import REPO

EXAMPLE = [
    row("execute_model", 0, 2_000_000, 1, 1),
    row("fence", 2_500_000, 3_000_000, 1, 2),
    row("sample_tokens", 2_000_000, 3_500_000, 1),
    row("execute_model", 4_000_000, 7_000_000, 2, 1),
]


@given(STEPS)
def test_rows_are_the_percentiles_and_sums_of_the_records(drawn: list[DrawnStep]) -> None:
    recorded = process(rows_of(drawn))
    rows = {line.name: line for line in table.rows(recorded)}
    steps = [step for step in recorded.steps() if step.continuing]
    expected: dict[str, list[int]] = {
        "step": [step.length for step in steps],
        "step that only begins requests": [
            step.length for step in recorded.steps() if not step.continuing
        ],
        "readback: started to ready": [s.ended - s.began for s in recorded.of("readback")],
        "readback: ready to consumed": [s.consumed - s.ended for s in recorded.of("readback")],
        "between outputs": [s.length for s in recorded.of("output") if s.continuing],
    }
    for step in steps:
        for name, length in step.parts.items():
            expected.setdefault(f"  {name}", []).append(length)
    for span in recorded.of("fence"):
        expected.setdefault(f"fence: {span.owner}", []).append(span.length)
    for name, values in expected.items():
        assert (name in rows) == bool(values)
        if values:
            percentiles = [np.percentile(values, percent) / 1e6 for percent in (50, 90, 99, 100)]
            assert rows[name].percentiles == pytest.approx(percentiles)
            assert rows[name].calls == len(values)
            assert rows[name].total == pytest.approx(sum(values) / 1e6)
    parts = [rows[f"  {part}"] for part in (*PARTS, OUTSIDE) if f"  {part}" in rows]
    if steps and rows["step"].total:
        assert sum(part.total for part in parts) == pytest.approx(rows["step"].total)
        assert sum(part.share or 0 for part in parts) == pytest.approx(1)
        assert rows["step"].share == 1


def test_what_is_in_no_step_is_shown_beside_them() -> None:
    """An engine's core without a worker has no steps; threads of their own are in none."""
    recorded = process([row("schedule", 0, 1_000_000, 0), row("schedule", 5, 3_000_005, 0)])
    (only,) = table.rows(recorded)
    assert (only.name, only.calls, only.share) == ("schedule", 2, None)
    assert only.total == 4


def test_the_table_for_people() -> None:
    lines = table.text([process(EXAMPLE, lost=1234)]).splitlines()
    assert lines[0] == "rank0 (pid 7): vLLM 0.22.0, pristine, CPU"
    assert "1,234 records" in lines[1]
    cells = {" ".join(line.split()) for line in lines}
    assert cells > {
        "count p50 ms p90 ms p99 ms max ms share",
        "step 1 4.000 4.000 4.000 4.000 100.0%",
        "sample_tokens 1 1.500 1.500 1.500 1.500 37.5%",
        "fence: thinking-budget 1 0.500 0.500 0.500 0.500",
    }
    assert len({len(line) for line in lines[2:6]}) == 1


def test_nothing_recorded_is_an_empty_table() -> None:
    nothing = process([], overlay="0.5.0", digest="ab" * 32)
    assert table.rows(nothing) == []
    assert "overlay 0.5.0, digest abababababab," in table.text([nothing])


# The program.


def test_json_is_the_same_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    trace = tmp_path / "file.json"
    assert main([str(tmp_path / "file"), "--json", "--trace", str(trace)]) == 0
    tables = json.loads(capsys.readouterr().out)
    rows = {line["name"]: line for line in tables["rank0"]["rows"]}
    assert rows["step"]["percentiles"] == [4, 4, 4, 4]
    assert rows["  sample_tokens"]["share"] == 0.375
    assert tables["rank0"]["header"]["pid"] == 7
    assert json.loads(trace.read_text())["traceEvents"]
    # The trace is not taken for one of the probe's files.
    assert main([str(tmp_path / "file")]) == 0


@pytest.mark.parametrize(
    ("second", "labels", "sentence"),
    [
        ({}, ["rank0", "rank1"], ""),
        ({"started_unix_ns": 1}, ["rank0"], "file.rank1 is of an earlier engine, and left out"),
        ({"boot": "another host's"}, ["rank0", "rank1"], "ran on several hosts"),
    ],
)
def test_the_program_prints_each_processs_table(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    second: dict[str, Any],
    labels: list[str],
    sentence: str,
) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    written(tmp_path / "file.rank1", EXAMPLE, label="rank1", **second)
    assert main([str(tmp_path / "file")]) == 0
    printed = capsys.readouterr()
    assert [line[:5] for line in printed.out.splitlines() if "pid" in line] == labels
    assert sentence in printed.err
    assert bool(sentence) == bool(printed.err)


@pytest.mark.parametrize("named", ["", ".", "/"])
def test_a_file_that_is_not_named_is_asked_for(
    capsys: pytest.CaptureFixture[str], named: str
) -> None:
    assert main([named]) == 1
    error = "probe: no file is named. Name the value of VLLM_READINESS_PROBE: make probe FILE="
    assert capsys.readouterr().err.startswith(error)


@pytest.mark.parametrize("arguments", [[], ["FILE="]])
def test_make_asks_for_a_file_as_well(arguments: list[str]) -> None:
    done = make("probe", *arguments)
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
