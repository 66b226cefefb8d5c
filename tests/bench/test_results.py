"""Ratios, intervals and marks of slices; runs as files and as Markdown."""

import gzip
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench import report
from bench import run as runs_of
from bench.errors import Failure
from bench.markdown import CUT_OFF, markdown, number
from bench.run import BUSY, LEVEL, Comparison, Slice, interval, load, loss, save
from support import runs
from support.runs import pairs, slice_of


def compare(slices: list[Slice], figure: str = "tokens/s", claims: int = 1) -> Comparison:
    return runs.run(*slices).compare(slices[0].group, figure, claims)


def test_a_place_s_advantage_cancels_in_a_pair() -> None:
    compared = compare(pairs(1.2, 1.21, 1.22, 1.23, 1.24))
    assert compared.ratio == pytest.approx(1.22, abs=1e-3)
    assert compared.low is not None
    assert compared.high is not None
    assert 1.19 < compared.low < 1.22 < compared.high < 1.25
    assert compared.first == pytest.approx(152)
    assert compared.second == 125
    assert (compared.pairs, compared.mark) == (5, "")
    wider = compare(pairs(1.2, 1.21, 1.22, 1.23, 1.24), claims=20)
    assert wider.low is not None
    assert wider.low < compared.low


SURE = (0.8, 0.81, 0.79, 0.8, 0.82)


@pytest.mark.parametrize(
    ("of", "ratio", "mark", "count"),
    [
        (pairs(1.2, 1.3, 1.2, 1.3), 1.249, "?", 4),
        (pairs(0.8, 1.3, 0.9, 1.1, 1.0), 1.006, "~", 5),
        (pairs(*SURE), 0.804, "", 5),
        (pairs(1.2, 1.3, 1.2, 1.3, 1.2, disturbed=["load"]), 1.239, "!", 0),
        # A slice whose order was not exchanged is no pair.
        ([*pairs(*SURE), slice_of(6, 0, 900, 100)], 0.804, "", 5),
        (
            [*pairs(*SURE), *[replace(s, round=6) for s in pairs(9.0, disturbed=["x"])]],
            0.804,
            "",
            5,
        ),
        # Noise of stock against itself.
        ([*pairs(*SURE), *pairs(1.0, 0.79, sides=("again", "stock"))], 0.804, "~", 5),
        ([*pairs(*SURE), *pairs(1.0, 0.81, sides=("again", "stock"))], 0.804, "", 5),
        (pairs(2.0, figure=BUSY), None, "", 0),
        (pairs(0.0, 2.0), 2.0, "?", 1),
        (pairs(-1e-9, 2.0), 2.0, "?", 1),
        ([slice_of(1, 0, 150, 100)], None, "", 0),
    ],
)
def test_only_a_ratio_of_enough_undisturbed_pairs_above_noise_is_a_claim(
    of: list[Slice], ratio: float | None, mark: str, count: int
) -> None:
    compared = compare(of, BUSY if BUSY in of[0].figures[0] else "tokens/s")
    assert compared.ratio == (ratio and pytest.approx(ratio, abs=1e-3))
    assert (compared.mark, compared.pairs) == (mark, count)


def test_slices_without_an_order_have_the_ratio_of_their_medians() -> None:
    rounds = [(50.0, 58.0), (60.75, 58.9), (70.0, 59.0), (61.0, 58.9), (40.0, 60.0)]
    compared = compare([slice_of(n, None, *each) for n, each in enumerate(rounds)])
    assert (compared.first, compared.second, compared.ratio) == (60.75, 58.9, 60.75 / 58.9)
    # Medians that point the other way than the rounds make no claim.
    rounds = [*[(0.5, 1.0)] * 7, *[(1.001, 1.0)] * 8]
    compared = compare([slice_of(n, None, *each) for n, each in enumerate(rounds)])
    assert compared.ratio == pytest.approx(1.001)
    assert compared.high is not None
    assert compared.high < 1
    assert compared.mark == "~"


@pytest.mark.parametrize("claims", [1, 20])
def test_equal_sides_are_told_apart_as_rarely_as_the_level_says(claims: int) -> None:
    chance = random.Random(claims)
    wrong = 0
    for _ in range(2000):
        bounds = interval([math.exp(chance.gauss(0, 0.1)) for _ in range(5)], claims)
        assert bounds is not None
        wrong += not bounds[0] <= 1 <= bounds[1]
    assert wrong / 2000 == pytest.approx(LEVEL / claims, abs=0.015 / claims**0.5)


def test_without_scipy_there_is_a_ratio_and_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    compared = compare(pairs(*SURE))
    assert (compared.low, compared.mark) == (None, "?")
    assert compared.ratio == pytest.approx(0.804, abs=1e-3)


def test_more_is_better_of_rates_alone() -> None:
    assert (loss("tokens/s", 0.5), loss("ITL p50", 0.5)) == (2.0, 0.5)


@pytest.mark.parametrize(
    ("value", "shown", "ratio"),
    [
        (None, "-", "-"),
        (3, "3", "3"),
        (0.0, "0", "0"),
        (1234.5, "1,234", "1,234"),
        (12.345, "12.35", "12.3"),
        (1.23456, "1.235", "1.235"),
        (0.012345, "0.0123", "0.012"),
        (0.0000123, "1e-05", "1e-05"),
    ],
)
def test_numbers(value: float | None, shown: str, ratio: str) -> None:
    assert (number(value), number(value, ratio=True)) == (shown, ratio)


def test_markdown_names_the_machine_the_command_and_what_went_wrong() -> None:
    slow = slice_of(1, 0, 1.0, 2.0, case=runs.HOSTILE, disturbed=["stock: steal 9%"])
    text = markdown(runs.run(slow, complete=False, problems=["it failed\nits log"]))
    for part in ("NVIDIA H100", "vLLM 0.22.0", "stock 12ab12ab12ab", "abababab", runs.RUN.command):
        assert part in text
    assert f"\n{CUT_OFF}\n" in text
    assert "- **failed**: it failed\n\n````\nits log\n````\n" in text
    assert "- disturbed: tiny, " in text
    (row,) = (line for line in text.splitlines() if "script" in line and line.startswith("|"))
    assert row.replace("\\|", "").count("|") == 11
    assert "| 375.0 | 125.0 | 3.000 ? | - | - | 1 |" in markdown(runs.run(*pairs(3.0)))


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    run = runs.run(*pairs(2.0))
    for file in (tmp_path / name, tmp_path / f"again-{name}"):
        save(file, run)
        assert load(file) == run
    data = (tmp_path / name).read_bytes()
    assert data == (tmp_path / f"again-{name}").read_bytes()
    assert (data[:2] == b"\x1f\x8b") == name.endswith("gz")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[]",
        lambda data: data.replace(b'"slices"', b'"others"'),
        lambda data: data.replace(b'"order"', b'"place"'),
        lambda data: gzip.compress(data)[:-9],
    ],
)
def test_a_file_that_is_not_a_whole_run_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "run.json"
    save(file, runs.run(*pairs(2.0)))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(Failure, match=r"run\.json cannot be read as a run"):
        load(file)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    runs_of.replace(file, b"former")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        runs_of.replace(file, b"later")
    assert file.read_text() == "former"


def test_runs_are_joined_pair_by_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = [runs.run(*pairs(2.0)), runs.run(*pairs(2.0, 2.0)), runs.run(*pairs(2.0))]
    files = [tmp_path / f"{n}.json" for n in range(3)]
    for file, run in zip(files, of, strict=True):
        save(file, run)
    out = tmp_path / "joined.json.gz"
    assert report.main([*map(str, files), "--join", str(out)]) == 0
    joined = load(out)
    assert [one.round for one in joined.slices] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert joined.seconds == 180.0
    assert capsys.readouterr().out == markdown(joined)
    assert report.main([str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read as a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "other",
    [
        {"digests": {"stock": "0" * 64}},
        {"device": "CPU"},
        {"title": "Others."},
        {"environment": {"VLLM_READINESS": "on"}},
    ],
)
def test_runs_that_measured_something_else_are_not_joined(other: dict[str, Any]) -> None:
    one = runs.run(*pairs(2.0))
    with pytest.raises(Failure, match="has another"):
        report.joined([one, runs.run(*pairs(2.0), **other)])
    report.joined([one, runs.run(*pairs(2.0), environment={**one.environment, "CUDA": "1"})])
