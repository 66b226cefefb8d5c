"""The table: percentiles of what was recorded, and parts that add up to the whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from probe import table
from probe.__main__ import main
from support.probes import OTHER, process, row, written
from support.sites import REPO

MS = 1_000_000
EXAMPLE = [
    row("execute_model", 0, 2 * MS, 1, 1),
    row("fence", 2_500_000, 3 * MS, 1, 2),
    row("sample_tokens", 2 * MS, 3_500_000, 1),
    row("execute_model", 4 * MS, 7 * MS, 2, 1),
]


def test_rows_are_the_percentiles_and_sums_of_the_records() -> None:
    """Of three steps, of which one only begins requests, and what lies in none of them."""
    rows = [
        row("schedule", 0, 1 * MS, 1),
        row("execute_model", 1 * MS, 3 * MS, 1, 2),
        row("sample_tokens", 3 * MS, 4 * MS, 1),
        row("fence", 3 * MS, 3_500_000, 1, 0),
        row("readback", 4 * MS, 5 * MS, 1, 0, 8 * MS),
        row("execute_model", 6 * MS, 7 * MS, 2, 2),
        row("readback", 7 * MS, 9 * MS, 2, 0, 9 * MS),
        row("output", 8 * MS, 9 * MS, 2, 2, OTHER),
        row("execute_model", 16 * MS, 20 * MS, 3, 0),
        row("output", 9 * MS, 19 * MS, 3, 0, OTHER),
        row("execute_model", 26 * MS, 27 * MS, 4, 1),
        row("execute_model", 30 * MS, 31 * MS, 5, 1),
    ]
    expected: dict[str, list[float]] = {
        "step": [5, 4],
        "  execute_model": [2, 1],
        "  sample_tokens": [1],
        "    waits: history": [0.5],
        "  outside": [2, 3],
        "step that only begins requests": [10],
        "schedule": [1],
        "fence: history": [0.5],
        "readback: started to ready": [1, 2],
        "readback: ready to consumed": [3, 0],
        "between outputs": [1],
    }
    shown = {line.name: line for line in table.rows(process(rows))}
    assert list(shown) == list(expected)
    for name, lengths in expected.items():
        percentiles = [np.percentile(lengths, percent) for percent in (50, 90, 99, 100)]
        assert shown[name].percentiles == pytest.approx(percentiles)
        assert (shown[name].calls, shown[name].total) == (len(lengths), sum(lengths))
    shares = [1, 3 / 9, 1 / 9, 0.5 / 9, 5 / 9]
    assert [shown[name].share for name in list(expected)[:6]] == [*shares, None]
    steps = [shown[name].per_step for name in list(expected)[:6]]
    assert steps == [*(pytest.approx(9 / 2 * share) for share in shares), None]
    parts = [line for line in shown.values() if line.name.startswith("  ") and line.name[2] != " "]
    assert sum(line.per_step or 0 for line in parts) == shown["step"].per_step


def test_nothing_recorded_is_an_empty_table() -> None:
    nothing = process([], overlay="0.5.0", digest="ab" * 32)
    assert table.rows(nothing) == []
    assert "overlay 0.5.0, digest abababababab," in table.text([nothing])
    assert "1,234 records" in table.text([process(EXAMPLE, lost=1234)])


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
        (
            {"engine": "earlier", "written_ns": 1},
            ["rank0"],
            "file.rank1 is of an earlier engine, and left out",
        ),
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


def test_only_the_newest_stretch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(written(tmp_path / "file.rank0", EXAMPLE))
    for length, kinds in (
        ("5ms", ["execute_model", "sample_tokens"]),
        ("3.5ms", ["execute_model"]),
    ):
        assert main([file, "--json", "--last", length]) == 0
        rows = json.loads(capsys.readouterr().out)["rank0"]["rows"]
        names = {line["name"].strip() for line in rows}
        assert names & {"execute_model", "sample_tokens"} == set(kinds)
    with pytest.raises(SystemExit):
        main([file, "--last", "1 day"])
    assert "write 30s, 500ms or 2m" in capsys.readouterr().err


def test_two_recordings_are_compared_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [row("execute_model", n * 8 * MS, (n * 8 + 4) * MS, n + 1, 3) for n in range(5)]
    slow += [row("fence", (n * 8 + 5) * MS, (n * 8 + 7) * MS, n + 1, 0) for n in range(5)]
    fast = [row("execute_model", n * 4 * MS, (n * 4 + 2) * MS, n + 1, 2) for n in range(9)]
    written(tmp_path / "stock.rank0", slow)
    written(tmp_path / "ours.rank0", fast, overlay="0.9.0", digest="ab")
    written(tmp_path / "ours.rank1", fast, label="rank1")
    files = [str(tmp_path / name) for name in ("stock", "ours")]
    assert main(["--compare", *files]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:2] == [
        "rank0: stock: pristine, 4 steps that continue 3 requests (median)",
        "rank0: ours: overlay 0.9.0, 8 steps that continue 2 requests (median)",
    ]
    assert set(lines) > {
        "step 8.000 4.000 8.000 4.000 8.000 4.000 0.500",
        "execute_model 4.000 2.000 4.000 2.000 4.000 2.000 0.500",
        "waits: history 2.000 2.000 2.000",
        "rank1: stock has no such process",
    }
    assert "same requests" in lines[-1]
    for wrong in ([], [files[0], "--compare", *files]):
        with pytest.raises(SystemExit):
            main(wrong)


@pytest.mark.parametrize("name", ["", "/", "file"])
def test_nothing_to_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([name, "--json"]) == 1
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
