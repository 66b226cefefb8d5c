"""Ratios, intervals and marks of slices; runs as files and as Markdown."""

import gzip
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import report
from bench.errors import Failure
from bench.harness.files import replace
from bench.results import intervals, slices
from bench.results.intervals import interval
from bench.results.markdown import CUT_OFF, markdown, number
from bench.results.run_file import load, save
from bench.results.slices import compare
from support import runs
from support.runs import pairs, slice_of


def test_a_place_s_advantage_cancels_in_a_pair() -> None:
    compared = compare(pairs(1.2, 1.21, 1.22, 1.23, 1.24), "tokens/s")
    assert compared.ratio == pytest.approx(1.22, abs=1e-3)
    assert compared.low is not None
    assert compared.high is not None
    assert 1.19 < compared.low < 1.22 < compared.high < 1.25
    assert compared.first == pytest.approx(152)
    assert compared.second == 125
    assert (compared.pairs, compared.mark) == (5, "")
    # A slice whose order was not exchanged is no pair.
    assert compare([*pairs(1.2, 1.21, 1.22, 1.23, 1.24), slice_of(6, 0, 900, 100)], "tokens/s")[
        2:6
    ] == (compared.ratio, compared.low, compared.high, 5)


@pytest.mark.parametrize(
    ("of", "ratio", "mark", "count"),
    [
        (pairs(1.2, 1.3, 1.2, 1.3), 1.249, "?", 4),
        (pairs(2.0)[:1], 3.0, "?", 0),
        (pairs(0.8, 1.3, 0.9, 1.1, 1.0), 1.006, "~", 5),
        (pairs(0.8, 0.81, 0.79, 0.8, 0.82), 0.804, "", 5),
        (pairs(1.2, 1.3, 1.2, 1.3, 1.2, disturbed=["load"]), 1.239, "!", 0),
    ],
)
def test_only_a_ratio_of_enough_undisturbed_pairs_is_a_claim(
    of: Any, ratio: float, mark: str, count: int
) -> None:
    compared = compare(of, "tokens/s")
    assert compared.ratio == pytest.approx(ratio, abs=1e-3)
    assert (compared.mark, compared.pairs) == (mark, count)


def test_disturbed_pairs_are_in_no_interval() -> None:
    clear = pairs(1.2, 1.21, 1.22, 1.23, 1.24)
    wild = [{**one, "round": 6, "disturbed": ["stock: steal 9%"]} for one in pairs(9.0)]
    assert compare([*clear, *wild], "tokens/s")[2:] == compare(clear, "tokens/s")[2:]


def test_a_quantile_is_divided_by_a_quantile() -> None:
    """Of a row that shows 58.90 and 60.75, the ratio is theirs."""
    rounds = [(50.0, 58.0), (60.75, 58.9), (70.0, 59.0), (61.0, 58.9), (40.0, 60.0)]
    of = [slice_of(n, None, *each, figure="part p50, us") for n, each in enumerate(rounds)]
    compared = compare(of, "part p50, us")
    assert (compared.first, compared.second) == (60.75, 58.9)
    assert compared.ratio == 60.75 / 58.9
    assert (compared.pairs, compared.mark) == (5, "~")


def test_equal_sides_have_a_ratio_around_1() -> None:
    """The p10 of single steps' ratios, which was published once, is 0.89 of equal sides."""
    chance = random.Random(7)

    def quantile() -> float:
        return sorted(math.exp(chance.gauss(0, 0.15)) for _ in range(200))[20]

    for _ in range(20):
        of = [slice_of(n, None, quantile(), quantile(), figure="p10") for n in range(5)]
        assert compare(of, "p10").ratio == pytest.approx(1.0, abs=0.06)


def test_medians_that_point_the_other_way_than_the_rounds_make_no_claim() -> None:
    rounds = [*[(0.5, 1.0)] * 7, *[(1.001, 1.0)] * 8]
    compared = compare([slice_of(n, None, *each) for n, each in enumerate(rounds)], "tokens/s")
    assert compared.ratio == pytest.approx(1.001)
    assert compared.high is not None
    assert compared.high < 1
    assert compared.mark == "~"


def test_a_ratio_within_the_noise_of_stock_is_no_claim() -> None:
    of = pairs(0.8, 0.81, 0.79, 0.8, 0.82)
    same = pairs(1.0, 1.0, 0.79, 1.0, 1.0, sides=("again", "stock"))
    assert compare(of, "tokens/s").mark == compare(of, "tokens/s", same=same[:4]).mark == ""
    assert compare(of, "tokens/s", same=same).mark == "~"
    groups = slices.grouped([*of, *same])
    assert slices.noise(groups, ("tiny", "plain, 4", ("overlaid", "stock"))) == same
    assert slices.noise(groups, ("tiny", "other", ("overlaid", "stock"))) == ()
    assert " 0.804 ~ |" in markdown(runs.run(*of, *same))


def test_a_problem_of_one_slice_refuses_the_ratios_of_its_group() -> None:
    of = [*pairs(2.0, 2.0), slice_of(3, 0, 1, 1, problems=["tokens differ"])]
    assert compare(of, "tokens/s")[2:] == (None, None, None, 0, "")
    text = markdown(runs.run(*of, *pairs(3.0, case="other")))
    assert "| plain, 4 | tokens/s | overlaid/stock | 200.0 | 100 | refused |" in text
    assert "- refused: tiny, plain, 4, round 3: tokens differ" in text
    assert "| other | tokens/s | overlaid/stock | 375.0 | 125.0 | 3.000 ? |" in text


@pytest.mark.parametrize("time", [0.0, -5e-6])
def test_a_time_that_is_not_above_0_has_no_ratio(time: float) -> None:
    of = pairs(2.0, 2.0, figure="TPOT p50")
    of[0]["figures"]["stock"]["TPOT p50"] = time
    assert compare(of, "TPOT p50").pairs == 1
    assert "TPOT p50" in markdown(runs.run(*of))


def test_a_warm_up_has_no_ratio() -> None:
    for figure in ("warm-up s", "device busy, %"):
        assert compare(pairs(2.0, figure=figure), figure).ratio is None
    assert compare(pairs(2.0, figure="tokens/s"), "tokens/s").ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("figure", "ratio", "worse"),
    [("tokens/s", 0.5, 2.0), ("tokens/s", 2.0, 0.5), ("ITL p50", 0.5, 0.5), ("ITL p50", 2.0, 2.0)],
)
def test_more_is_better_of_rates_alone(figure: str, ratio: float, worse: float) -> None:
    assert slices.loss(figure, ratio) == worse


@pytest.mark.parametrize("claims", [1, 20])
def test_equal_sides_are_told_apart_as_rarely_as_the_level_says(claims: int) -> None:
    chance = random.Random(claims)
    wrong = 0
    for _ in range(2000):
        bounds = interval([math.exp(chance.gauss(0, 0.1)) for _ in range(5)], claims)
        assert bounds is not None
        wrong += not bounds[0] <= 1 <= bounds[1]
    assert wrong / 2000 == pytest.approx(intervals.LEVEL / claims, abs=0.015 / claims**0.5)


def test_without_scipy_there_is_a_ratio_and_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    of = pairs(1.2, 1.21, 1.22, 1.23, 1.24)
    monkeypatch.setitem(sys.modules, "scipy", None)
    compared = compare(of, "tokens/s")
    assert (compared.low, compared.mark) == (None, "?")
    assert compared.ratio == pytest.approx(1.22, abs=1e-3)


def test_slices_that_lack_outputs_are_problems() -> None:
    figures: dict[str, Any] = {"a": {slices.UNANSWERED: 3, "tokens/s": 1.0}, "b": {"tokens/s": 0}}
    assert slices.found_in(figures) == [f"a: 3 {slices.UNANSWERED}", "b: no tokens"]


def test_compiled_kernels_are_named_with_their_number() -> None:
    one = slice_of(1, 0, 1.0, 1.0)
    one["figures"]["overlaid"][slices.COMPILED] = ["k", "k", "l"]
    assert [slices.compiled([one], place) for place in (0, 1)] == ["3: k x2, l", "0"]
    assert f"| {slices.COMPILED} | overlaid/stock | 3: k x2, l | 0 |" in markdown(runs.run(one))


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
    for part in ("NVIDIA H100", "driver 570.124", "vLLM 0.22.0", "stock 12ab12ab12ab"):
        assert part in text
    assert f"\n{CUT_OFF}\n" in text
    assert "- refused: it failed\n\n````\nits log\n````\n" in text
    assert "- disturbed: tiny, " in text
    (row,) = (line for line in text.splitlines() if "script" in line and line.startswith("|"))
    assert row.replace("\\|", "").count("|") == 11


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_run_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    run = runs.run(*pairs(2.0))
    for file in (tmp_path / name, tmp_path / f"again-{name}"):
        save(file, run)
        assert load(file) == run
    data = (tmp_path / name).read_bytes()
    assert data == (tmp_path / f"again-{name}").read_bytes()
    compressed = name.endswith("gz")
    assert (data[:2] == b"\x1f\x8b") == compressed
    assert not compressed or data[4:8] == bytes(4), "the time is in the file"
    # The name does not decide.
    (tmp_path / "other.json").write_bytes(gzip.compress(json.dumps(run).encode()))
    assert load(tmp_path / "other.json") == run


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[]",
        lambda data: data.replace(b'"schema": 3', b'"schema": 9'),
        lambda data: data.replace(b'"slices"', b'"others"'),
        lambda data: data.replace(b"60.0", b"NaN"),
        lambda data: data.replace(b'"schema": 3', b'"schema": 2'),
        lambda data: gzip.compress(data)[:-9],
    ],
)
def test_a_file_that_is_not_a_whole_run_is_named(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "run.json"
    save(file, runs.run(*pairs(2.0)))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(Failure, match=r"run\.json "):
        load(file)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    replace(file, b"former")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        replace(file, b"later")
    assert file.read_text() == "former"


def test_runs_are_joined_pair_by_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = [runs.run(*pairs(2.0)), runs.run(*pairs(2.0, 2.0)), runs.run(*pairs(2.0))]
    files = [tmp_path / f"{n}.json" for n in range(3)]
    for file, run in zip(files, of, strict=True):
        save(file, run)
    out = tmp_path / "joined.json.gz"
    assert report.main([*map(str, files), "--join", str(out)]) == 0
    run = load(out)
    assert [one["round"] for one in run["slices"]] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert compare(run["slices"], "tokens/s").pairs == 4
    assert run["seconds"] == 180.0
    text = capsys.readouterr().out
    assert text == markdown(run)
    lost = runs.run(*pairs(2.0))
    lost["manifest"]["groups"].append(["tiny", "lost", ["overlaid", "stock"]])
    save(files[0], lost)
    assert report.main([*map(str, files), "--join", str(out)]) == 0
    assert "NOT AS DECIDED**: tiny, lost, overlaid/stock was left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        {"digests": {"stock": "0" * 64}},
        {"machine": {"device": "CPU"}},
        {"title": "Others."},
        {"environment": {"VLLM_READINESS": "on"}},
    ],
)
def test_runs_that_measured_something_else_are_not_joined(other: dict[str, Any]) -> None:
    one = runs.run(*pairs(2.0))
    with pytest.raises(Failure):
        report.joined([one, runs.run(*pairs(2.0), **other)])
    report.joined([one, runs.run(*pairs(2.0), environment={**one["environment"], "CUDA": "1"})])


def test_the_command_names_a_missing_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read as a run" in capsys.readouterr().err
