"""The probe's files, read: their records, and the faults that they can have."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe import engines, records
from probe.records import OUTSIDE, ProbeError, Span
from support import probes
from support.probes import MAIN, OTHER, STEPS, DrawnStep, content, process, row, rows_of, written

EXAMPLE = [
    row("execute_model", 100, 200, 1, 0),
    row("fence", 220, 240, 1, 2),
    row("sample_tokens", 210, 260, 1),
    row("readback", 230, 300, 1, 0, 350),
    row("get_output", 280, 350, 1, 0, OTHER),
    row("output", 50, 350, 1, 3, OTHER),
]
SPANS = [
    Span("execute_model", 100, 200, 1, "", 0, MAIN, 0),
    Span("fence", 220, 240, 1, "thinking-budget", 0, MAIN, 0),
    Span("sample_tokens", 210, 260, 1, "", 0, MAIN, 0),
    Span("readback", 230, 300, 1, "", 0, 0, 350),
    Span("get_output", 280, 350, 1, "", 0, OTHER, 0),
    Span("output", 50, 350, 1, "", 3, OTHER, 0),
]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_file_is_read_whatever_its_byte_order(tmp_path: Path, swapped: bool) -> None:
    recorded = records.read(written(tmp_path / "file.rank0", EXAMPLE, swapped=swapped))
    assert recorded.label == "rank0"
    assert recorded.header["vllm"] == "0.22.0"
    assert recorded.spans == SPANS
    within = recorded.within(100, 300).spans
    assert [span.kind for span in within] == ["execute_model", "fence", "sample_tokens", "readback"]


def test_more_fields_and_kinds_are_left_aside() -> None:
    wider = [(*record, 77) for record in [*EXAMPLE, (8, 1, 2, 3, 4, 5)]]
    fields, kinds = [*records.FIELDS, "more"], [*probes.KINDS, "newer"]
    recorded = process(wider, fields=fields, kinds=kinds, records=len(wider))  # type: ignore[arg-type]
    assert recorded.spans[:-1] == SPANS
    assert recorded.spans[-1].kind == "newer"


def refused(data: bytes) -> str:
    """The sentence: it names the file, and the next step."""
    with pytest.raises(ProbeError, match=r"file\.rank0") as caught:
        records.parse(Path("file.rank0"), data)
    sentence = str(caught.value)
    assert any(step in sentence for step in ("Name the value", "written again", "read it with"))
    return sentence


@given(st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused(data: st.DataObject) -> None:
    whole = content(EXAMPLE)
    refused(whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is not a file of the probe"),
        (b"[" * 100_000, "is not a file of the probe"),
        (b"\xff\x00 no JSON", "is not a file of the probe"),
        (b'{"traceEvents": []}\n', "is not a file of the probe"),
        (b'{"format": "vllm-readiness-probe"}\n', "damaged"),
        (content(EXAMPLE, version=3, overlay="9.1.0"), "9.1.0"),
        (content(EXAMPLE, fields=["kind", "ended", "began", *records.FIELDS[3:]]), "version"),
        (content(EXAMPLE, records=7), "cut off"),
        (content(EXAMPLE, records=5), "damaged"),
        (content(EXAMPLE, kinds=["execute_model"]), "damaged"),
        (content(EXAMPLE, owners=None), "damaged"),
    ],
)
def test_a_file_of_another_program_or_in_contradiction_is_refused(
    data: bytes, sentence: str
) -> None:
    assert sentence in refused(data)


# Steps.


@given(STEPS)
def test_a_step_lasts_until_the_next_one_and_its_parts_and_waits_add_up(
    drawn: list[DrawnStep],
) -> None:
    """Where the next one continues requests; else there may have been a pause between."""
    rows = rows_of(drawn)
    random.Random(0).shuffle(rows)
    recorded = process(rows)
    steps = {step.number: step for step in recorded.steps()}
    followed = [n for n, (_, after) in enumerate(pairwise(drawn), 1) if after.continuing]
    assert list(steps) == followed
    waits: Counter[str] = Counter()
    for number, one in enumerate(drawn, 1):
        lengths: Counter[str] = Counter()
        for part in one.parts:
            lengths[part.kind] += part.length
            if part.wait is not None:
                waits[part.kind] += part.wait[0]
        if number in steps:
            lengths[OUTSIDE] = one.gap + sum(part.gap for part in one.parts[1:])
            assert steps[number].parts == lengths
            assert steps[number].length == sum(lengths.values())
    assert recorded.waits() == waits


def test_a_part_within_another_counts_once_and_another_threads_does_not() -> None:
    (step,) = process(
        [
            row("execute_model", 0, 10, 1),
            row("get_output", 15, 20, 1),
            row("get_output", 5, 35, 1, 0, OTHER),
            row("sample_tokens", 12, 30, 1),
            row("execute_model", 40, 50, 2, 1),
        ]
    ).steps()
    assert step.parts == {"execute_model": 10, "sample_tokens": 18, OUTSIDE: 12}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_step_whose_record_is_lost_is_in_no_other_step(lost: int) -> None:
    rows = [row("execute_model", 10 * n, 10 * n + 5, n, 1) for n in range(5)]
    del rows[lost]
    numbers = [step.number for step in process(rows).steps()]
    assert numbers == sorted({0, 1, 2, 3} - {lost, lost - 1})


def test_waits_are_looked_for_in_their_own_thread() -> None:
    rows = [
        row("sample_tokens", 0, 100, 1),
        row("get_output", 20, 80, 1, 0, OTHER),
        row("fence", 30, 37, 1, 0, OTHER),
        row("fence", 40, 43, 1, 0),
        row("fence", 90, 95, 1, 0, OTHER),
        row("fence", 100, 110, 1, 0),
    ]
    assert process(rows).waits() == {"get_output": 7, "sample_tokens": 3, OUTSIDE: 15}


# The files of one engine.


@pytest.mark.parametrize("name", ["file", "a [probe]*?"])
def test_an_engines_files_are_found_by_rank(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    written(tmp_path / "a p.rank0", EXAMPLE)
    labels = ["dp0-rank1", "dp1-rank0", "engine0", "rank2", "rank10"]
    for label in labels:
        written(Path(f"{file}.{label}"), EXAMPLE, label=label)
    for other in ("rank0.tmp", "rank0.77.tmp", "rank0.metrics", "rank0.metrics.7.new", "json"):
        Path(f"{file}.{other}").write_text("something else")
    written(Path(f"{file}.other.rank0"), EXAMPLE)
    Path(f"{file}.rank3").mkdir()
    processes, left_out = engines.engine(file)
    assert ([one.label for one in processes], left_out) == (labels, [])
    (one,), left_out = engines.engine(Path(f"{file}.rank2"))
    assert (one.label, left_out) == ("rank2", [])


@pytest.mark.parametrize("version", [1, 2])
def test_files_of_an_earlier_engine_are_left_out(tmp_path: Path, version: int) -> None:
    """It had more processes, and wrote the last file before the newest engine began."""
    for label, began, ended in (
        ("rank0", 1000, 2000),
        ("rank1", 1001, 1500),
        ("rank2", 10, 900),
        ("engine0", 990, 1990),
    ):
        # Clocks of different processes of one host: the same one.
        times: dict[str, Any] = {"started_unix_ns": 10**18 + began, "started_ns": began}
        if version == 2:  # whose time of day was set back an hour before rank1 began
            times["engine"] = "earlier" if label == "rank2" else "newest"
            times["started_unix_ns"] -= 3600 * 10**9 * (label == "rank1")
        else:
            times["engine"] = None
        file = tmp_path / f"file.{label}"
        written(file, EXAMPLE, label=label, written_ns=ended, version=version, **times)
    processes, remarks = engines.engine(tmp_path / "file")
    assert [one.label for one in processes] == ["engine0", "rank0", "rank1"]
    assert remarks == [f"{tmp_path / 'file.rank2'} is of an earlier engine, and left out"]


def test_a_worker_without_a_file_and_one_that_ends_early_are_named(tmp_path: Path) -> None:
    second = 10**9
    workers = ["rank0", "rank1", "rank2"]
    for label, end in (("rank0", 60), ("rank2", 25), ("engine0", 1)):
        rows = [row("execute_model", 0, 5), row("execute_model", end * second - 5, end * second, 2)]
        written(tmp_path / f"file.{label}", rows, label=label, workers=workers)
    _, remarks = engines.engine(tmp_path / "file")
    assert remarks == [
        "rank1 has no file: it was killed, has made no step, or is on another host",
        "rank2 ends 35 s before the others: was it killed?",
    ]


def test_the_newest_stretch_is_that_of_all_processes(tmp_path: Path) -> None:
    second = 10**9
    for label, end in (("rank0", 60), ("rank1", 55)):
        rows = [row("execute_model", n * second, n * second + 5, n + 1) for n in range(end)]
        written(tmp_path / f"file.{label}", rows, label=label)
    processes, _ = engines.engine(tmp_path / "file")
    kept = engines.newest(processes, 10.0)
    assert [len(process.spans) for process in kept] == [10, 5]
    assert [process.spans[-1].step for process in kept] == [60, 55]


def test_processes_of_several_hosts_are_brought_together_by_the_time_of_day(
    tmp_path: Path,
) -> None:
    """Their clocks began when the hosts did."""
    rows = [row("execute_model", 10, 20), row("readback", 12, 18, 1, 0, 19)]
    for label, boot, started in (("rank0", "one", 5), ("rank1", "one", 6), ("rank2", "other", 2)):
        times: dict[str, Any] = {"started_unix_ns": 10**18 + 7, "started_ns": started}
        written(tmp_path / f"file.{label}", rows, label=label, boot=boot, **times)
    (tmp_path / "alone").mkdir()
    for rank in (0, 1):  # of one host, whose time of day was set between their beginnings
        times = {"label": f"rank{rank}", "started_unix_ns": 10**18 + 10**6 * rank}
        written(tmp_path / "alone" / f"file.rank{rank}", rows, **times)
    processes, _ = engines.engine(tmp_path / "file")
    assert engines.several_hosts(processes)
    for worker, since in zip(processes, (2, 1, 5), strict=True):
        launch, copy = worker.spans
        assert (launch.began, launch.ended) == (10**18 + since + 10, 10**18 + since + 20)
        assert (launch.consumed, copy.consumed) == (0, 10**18 + since + 19)
    processes, _ = engines.engine(tmp_path / "alone" / "file")
    assert not engines.several_hosts(processes)
    assert [worker.spans[0].began for worker in processes] == [10, 10]


def test_a_missing_or_bad_file_is_named(tmp_path: Path) -> None:
    for missing in (tmp_path / "none.rank0", tmp_path):
        with pytest.raises(ProbeError, match=f"{missing}: .*Name the value"):
            records.read(missing)
    with pytest.raises(ProbeError, match=r"file\.\*.*SIGUSR2.*VLLM_READINESS_PROBE=.*/file "):
        engines.engine(tmp_path / "file")
    written(tmp_path / "file.rank0", EXAMPLE)
    (tmp_path / "file.rank1").write_text("?")
    with pytest.raises(ProbeError, match=r"file\.rank1"):
        engines.engine(tmp_path / "file")
