"""The probe's files, read: what is in them, and what is wrong with them."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from probe import records
from probe.records import OUTSIDE, ProbeError
from support import probes
from support.probes import MAIN, OTHER, STEPS, Made, process, row, rows_of, written

EXAMPLE = [
    row("execute_model", 100, 200, 1, 0),
    row("fence", 220, 240, 1, 2),
    row("sample_tokens", 210, 260, 1),
    row("readback", 230, 300, 1, 0, 350),
    row("get_output", 280, 350, 1, 0, OTHER),
    row("output", 50, 350, 1, 3, OTHER),
]


def test_a_file_is_read(tmp_path: Path) -> None:
    found = records.read(written(tmp_path / "file.rank0", EXAMPLE))
    assert found.label == "rank0"
    assert found.header["vllm"] == "0.22.0"
    assert found.spans == [
        records.Span("execute_model", 100, 200, 1, "", 0, MAIN, 0),
        records.Span("fence", 220, 240, 1, "thinking-budget", 0, MAIN, 0),
        records.Span("sample_tokens", 210, 260, 1, "", 0, MAIN, 0),
        records.Span("readback", 230, 300, 1, "", 0, 0, 350),
        records.Span("get_output", 280, 350, 1, "", 0, OTHER, 0),
        records.Span("output", 50, 350, 1, "", 3, OTHER, 0),
    ]
    assert [span.length for span in found.spans] == [100, 20, 50, 70, 70, 300]


def test_a_file_of_a_machine_of_the_other_byte_order_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "file.rank0"
    mine = records.read(written(path, EXAMPLE)).spans
    assert records.read(written(path, EXAMPLE, swapped=True)).spans == mine


def test_fields_and_kinds_of_a_later_file_are_left_aside(tmp_path: Path) -> None:
    """What a field or a kind means stays; there may be more of them."""
    wider = [(*each, 77) for each in [*EXAMPLE, (8, 1, 2, 3, 4, 5)]]
    path = written(
        tmp_path / "file.rank0",
        wider,  # type: ignore[arg-type]
        fields=[*records.FIELDS, "more"],
        kinds=[*probes.KINDS, "newer"],
        records=len(wider),
    )
    found = records.read(path)
    assert found.spans[:-1] == records.read(written(path, EXAMPLE)).spans
    assert found.spans[-1].kind == "newer"


@given(st.data())
def test_a_file_that_is_cut_off_anywhere_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("cut") / "file.rank0", EXAMPLE)
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refused(path)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a file of the probe"),
        (b"[" * 100_000, "is not a file of the probe"),
        (b"[1, 2]\n", "is not a file of the probe"),
        (b"\xff\x00 no JSON", "is not a file of the probe"),
        (b'{"traceEvents": []}\n', "is not a file of the probe"),
        (b'{"format": "vllm-readiness-probe"}\n', "damaged"),
    ],
)
def test_another_programs_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "file.rank0"
    path.write_bytes(content)
    assert sentence in refused(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2, "overlay": "9.1.0"}, "9.1.0"),
        ({"version": 2}, "version"),
        ({"fields": ["kind", "ended", "began", "step", "owner", "extra"]}, "version"),
        ({"fields": ["kind"]}, "version"),
        ({"records": 7}, "cut off"),
        ({"records": 5}, "cut off"),
        ({"records": None}, "damaged"),
        ({"kinds": ["execute_model"]}, "damaged"),
        ({"owners": []}, "damaged"),
        ({"owners": None}, "damaged"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(written(tmp_path / "file.rank0", EXAMPLE, **changes))


@pytest.mark.parametrize("name", sorted(probes.header(0)))
def test_a_first_line_that_lacks_something_is_refused(tmp_path: Path, name: str) -> None:
    if name in ("features", "torch", "command"):  # for people; no program reads them
        return
    path = written(tmp_path / "file.rank0", EXAMPLE)
    line, rest = path.read_bytes().split(b"\n", 1)
    header = json.loads(line)
    del header[name]
    path.write_bytes(json.dumps(header).encode() + b"\n" + rest)
    refused(path)


def refused(path: Path) -> str:
    """The sentence: it names the file, and says what to do."""
    with pytest.raises(ProbeError) as caught:
        records.read(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert any(step in sentence for step in ("Name the value", "written again", "read it with"))
    return sentence


# Steps.


@given(STEPS)
def test_a_step_lasts_until_the_next_one_and_its_parts_add_up(made: list[Made]) -> None:
    """Where the next one continues requests; else there may have been a pause between."""
    found = {step.number: step for step in process(rows_of(made)).steps()}
    followed = [n for n, (_, after) in enumerate(pairwise(made), 1) if after.continuing]
    assert list(found) == followed
    for number, step in found.items():
        one = made[number - 1]
        lengths: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        owners: Counter[str] = Counter()
        for part in one.parts:
            lengths[part.kind] += part.length
            if part.wait is not None:
                waiting[part.kind] += part.wait[0]
                owners[probes.OWNERS[part.wait[1]]] += 1
        outside = one.gap + sum(part.gap for part in one.parts[1:])
        assert step.parts == {**lengths, OUTSIDE: outside}
        assert sum(step.parts.values()) == step.length
        assert step.waiting == waiting
        assert step.fences == owners


@given(STEPS, st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(made: list[Made], chance: Any) -> None:
    rows = rows_of(made)
    expected = process(rows).steps()
    chance.shuffle(rows)
    assert process(rows).steps() == expected


def test_a_part_within_another_counts_once() -> None:
    (step,) = process(
        [
            row("execute_model", 0, 10, 1),
            row("get_output", 15, 20, 1),
            row("sample_tokens", 12, 30, 1),
            row("execute_model", 40, 50, 2, 1),
        ]
    ).steps()
    assert step.parts == {"execute_model": 10, "sample_tokens": 18, OUTSIDE: 12}


def test_the_work_of_another_thread_is_not_part_of_the_step() -> None:
    (step,) = process(
        [
            row("execute_model", 0, 10, 1),
            row("get_output", 5, 35, 1, 0, OTHER),
            row("fence", 6, 30, 1, 0, OTHER),
            row("sample_tokens", 12, 30, 1),
            row("execute_model", 40, 50, 2, 1),
        ]
    ).steps()
    assert step.parts == {"execute_model": 10, "sample_tokens": 18, OUTSIDE: 12}
    assert step.waiting == {}
    assert step.fences == {"history": 1}


def test_a_step_that_begins_requests_alone_ends_a_pause() -> None:
    """How long the one before took is not known: nobody may have asked for anything."""
    rows = [row("execute_model", at, at + 5, n) for n, at in enumerate((0, 10, 1000), 1)]
    rows[1] = row("execute_model", 10, 15, 2, 1)
    assert [step.number for step in process(rows).steps()] == [1]


@pytest.mark.parametrize("gone", [1, 2])
def test_a_step_whose_record_is_lost_is_in_no_other_step(gone: int) -> None:
    rows = [row("execute_model", 10 * n, 10 * n + 5, n, 1) for n in range(5)]
    del rows[gone]
    assert [step.number for step in process(rows).steps()] == sorted(
        {0, 1, 2, 3} - {gone, gone - 1}
    )


def test_intervals_are_those_of_steps_that_continue_requests() -> None:
    rows = [row("output", 0, 10, 1, 4), row("output", 10, 500, 2, 0), row("output", 500, 530, 3, 1)]
    assert process(rows).intervals() == [10, 30]


@given(STEPS)
def test_waits_count_to_the_part_that_they_are_in(made: list[Made]) -> None:
    expected: Counter[str] = Counter()
    for step in made:
        for part in step.parts:
            if part.wait is not None:
                expected[part.kind] += part.wait[0]
    assert process(rows_of(made)).waits() == expected


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


def test_a_window_keeps_what_lies_in_it() -> None:
    found = process(EXAMPLE).within(100, 300)
    assert [span.kind for span in found.spans] == [
        *("execute_model", "fence", "sample_tokens", "readback")
    ]


# The files of one engine.


@pytest.mark.parametrize("called", ["file", "a [probe]*?"])
def test_an_engines_files_are_found_by_rank(tmp_path: Path, called: str) -> None:
    name = tmp_path / called
    written(tmp_path / "a p.rank0", EXAMPLE)
    for label in ("rank10", "rank2", "engine0", "dp1-rank0", "dp0-rank1"):
        written(Path(f"{name}.{label}"), EXAMPLE, label=label)
    for other in ("rank0.tmp", "rank0.77.tmp", "rank0.metrics", "rank0.metrics.7.new", "json"):
        Path(f"{name}.{other}").write_text("something else")
    written(Path(f"{name}.other.rank0"), EXAMPLE)
    Path(f"{name}.rank3").mkdir()
    found, left_out = records.engine(name)
    labels = [each.label for each in found]
    assert sorted(labels) == sorted({"rank10", "rank2", "engine0", "dp1-rank0", "dp0-rank1"})
    assert labels.index("rank2") < labels.index("rank10")
    assert left_out == []


def test_one_process_may_be_named(tmp_path: Path) -> None:
    for label in ("rank0", "rank1"):
        written(tmp_path / f"file.{label}", EXAMPLE, label=label)
    (found,), left_out = records.engine(tmp_path / "file.rank1")
    assert found.label == "rank1"
    assert left_out == []


def test_files_of_an_earlier_engine_are_left_out(tmp_path: Path) -> None:
    """It had more processes, and wrote the last file before the newest engine began."""

    def at(label: str, began: int, ended: int) -> None:
        path = tmp_path / f"file.{label}"
        # Clocks of different processes of one host: the same one.
        times: dict[str, Any] = {"started_unix_ns": 10**18 + began, "started_ns": began}
        times["written_ns"] = ended
        written(path, EXAMPLE, label=label, **times)

    at("rank0", 1000, 2000)
    at("rank1", 1001, 1500)
    at("rank2", 10, 900)
    at("engine0", 990, 1990)
    found, left_out = records.engine(tmp_path / "file")
    assert sorted(each.label for each in found) == ["engine0", "rank0", "rank1"]
    assert left_out == [f"{tmp_path / 'file.rank2'} is of an earlier engine"]


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
    found, _ = records.engine(tmp_path / "file")
    assert records.several_hosts(found)
    for each, since in zip(found, (2, 1, 5), strict=True):
        execute, copy = each.spans
        assert (execute.began, execute.ended) == (10**18 + since + 10, 10**18 + since + 20)
        assert (execute.consumed, copy.consumed) == (0, 10**18 + since + 19)
    found, _ = records.engine(tmp_path / "alone" / "file")
    assert not records.several_hosts(found)
    assert [each.spans[0].began for each in found] == [10, 10]


def test_a_missing_file_says_what_to_look_at(tmp_path: Path) -> None:
    refused(tmp_path / "none.rank0")
    refused(tmp_path)
    with pytest.raises(ProbeError, match=r"file\.\*.*SIGUSR2.*VLLM_READINESS_PROBE=.*/file "):
        records.engine(tmp_path / "file")


def test_one_bad_file_is_named(tmp_path: Path) -> None:
    written(tmp_path / "file.rank0", EXAMPLE)
    (tmp_path / "file.rank1").write_text("?")
    with pytest.raises(ProbeError, match=r"file\.rank1"):
        records.engine(tmp_path / "file")


def test_nothing_has_no_percentile() -> None:
    assert records.percentile([], 50) is None
