"""A run that was edited is named, and what nobody can check is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import report
from bench.compare import outputs
from bench.compare.raw import recorded, restored
from bench.measurements import RUNS
from bench.reports.markdown import markdown
from bench.reports.run_file import load
from bench.reports.verify import edited, unproven
from support import runs


def case(run: dict[str, Any], name: str = "presence") -> Any:
    return run["rows"]["row"]["cases"][name]


def raw(run: dict[str, Any], number: int, name: str = "presence") -> Any:
    """A case of a child, which are stock and overlaid in turn."""
    return run["rows"]["row"]["children"][number]["cases"][name]


def change_ratio(run: dict[str, Any]) -> None:
    case(run)["figures"]["tokens/s"]["ratios"]["overlaid"] *= 2


def change_median(run: dict[str, Any]) -> None:
    case(run)["figures"]["ITL p50"]["overlaid"] /= 2


def change_count(run: dict[str, Any]) -> None:
    case(run)["counts"]["overlaid"][1]["tokens"] = [31, 32]


def change_raw_count(run: dict[str, Any]) -> None:
    for one in (case(run)["counts"]["overlaid"][0], raw(run, 1)["counts"]):
        one["tokens"] = [64, 64]


def change_round(run: dict[str, Any]) -> None:
    case(run)["figures"]["ITL p50"]["rounds"]["stock"][2] *= 3


def swap_digests(run: dict[str, Any]) -> None:
    """Of two rounds of one side."""
    one, other = raw(run, 1), raw(run, 3)
    one["digests"], other["digests"] = other["digests"], one["digests"]


def swap_prompts(run: dict[str, Any]) -> None:
    """Of two rounds of both sides."""
    for side in (0, 1):
        one, other = raw(run, side), raw(run, 2 + side)
        one["prompts"], other["prompts"] = other["prompts"], one["prompts"]


def drop_problem(run: dict[str, Any]) -> None:
    raw(run, 1)["problems"] = ["the probe saw 3 of 4 steps"]


def add_problem(run: dict[str, Any]) -> None:
    case(run)["problems"]["stock"] = ["stock round 1: it was late"]


def slow_clock(run: dict[str, Any]) -> None:
    raw(run, 1)["clock"][2] += 1_000_000_000


def change_disturbance(run: dict[str, Any]) -> None:
    raw(run, 3)["disturbance"]["run delay"] = 0.5


def drop_round(run: dict[str, Any]) -> None:
    del run["rows"]["row"]["children"][9]


def drop_case(run: dict[str, Any]) -> None:
    del run["rows"]["row"]["cases"]["none"]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (change_ratio, "row: presence: figures, tokens/s, ratios, overlaid: the run says 7."),
        (change_median, "row: presence: figures, ITL p50, overlaid: the run says 10."),
        (change_count, "row: presence: counts, overlaid: the run says "),
        (change_raw_count, "presence: overlaid round 1: 64 tokens in 0.084 s are not its tokens/s"),
        (change_round, "presence: figures, ITL p50, rounds, stock: the run says"),
        (swap_digests, "tokens of stock round 1 and overlaid round 1, and overlaid has a ratio"),
        (swap_digests, "logprobs of stock round 2 and overlaid round 2, and overlaid has a ratio"),
        (swap_prompts, "presence: overlaid round 2: its prompts are not those of its round"),
        (drop_problem, "the probe saw 3 of 4 steps, and overlaid has a ratio"),
        (add_problem, "stock round 1: it was late: its children do not say so"),
        (slow_clock, "overlaid round 1: its clock counted 0.08 s, the parent's 1.08 s"),
        (change_disturbance, "presence: disturbances, overlaid: the run says"),
        (drop_round, "row: rounds: the run says 5, its children 4"),
        (drop_case, "row: stock round 1 has the cases none, presence"),
    ],
)
def test_what_was_edited_is_named_and_nothing_is_shown(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, Any]], None],
    told: str,
) -> None:
    run = runs.measured()
    assert edited(run) == []
    edit(run)
    assert any(told in text for text in edited(run)), edited(run)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    for arguments in ([], ["--verify"]):
        assert report.main([str(file), *arguments]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert f"report: {file} was edited: row: " in printed.err


def test_what_cannot_be_checked_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(runs.measured()))
    assert report.main([str(file), "--verify"]) == 0
    printed = capsys.readouterr().out
    assert "what it shows is what its raw figures make" in printed
    assert "no file can prove" in printed
    assert "schema 1" not in printed
    assert "schema 1" in unproven(runs.engine())[0]
    assert markdown(runs.engine()).count("An older run: it holds no raw figures") == 1
    assert "An older run" not in markdown(runs.measured())
    assert "this table holds no rounds" in unproven(runs.table())[0]
    assert not any("table" in text for text in unproven(load(RUNS / "h100-host.json")))


def change_a_ratio(run: dict[str, Any]) -> None:
    run["rows"][3][5] = 0.4


def remove_a_mark(run: dict[str, Any]) -> None:
    run["rows"][0][5] = run["rows"][0][5][0]


def change_a_part(run: dict[str, Any]) -> None:
    for of in run["rounds"].values():
        of["cases"]["batch 128"]["parts"]["execute_model"]["overlaid"]["p50"] /= 2


def drop_a_row(run: dict[str, Any]) -> None:
    del run["rows"][-1]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (change_a_ratio, "async 1k, batch 128, execute_model p50, overlaid / stock: the run says"),
        (remove_a_mark, "async 1k, batch 128, schedule p10, overlaid / stock: the run says"),
        (change_a_part, "async 1k, batch 128, execute_model p50, overlaid: the run says"),
        (drop_a_row, "rows, its rounds make"),
    ],
)
def test_a_table_that_its_rounds_do_not_make_is_named(
    edit: Callable[[dict[str, Any]], None], told: str
) -> None:
    run = load(RUNS / "h100-host.json")
    edit(run)
    assert any(told in text for text in edited(run)), edited(run)


@pytest.mark.parametrize("file", sorted(RUNS.glob("*.json")), ids=lambda file: str(file.stem))
def test_published_runs_were_not_edited(file: Path) -> None:
    assert edited(load(file)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("figures", "ITL p50", "stock"), 1.0),
        (("figures", "ITL p50", "rounds", "overlaid"), [1.0] * 5),
        (("figures", "ITL p50", "rounds", "overlaid"), [1.0] * 4),
        (("figures", "tokens/s", "ratios", "overlaid"), 3.0),
        (("counts", "overlaid"), [{"tokens": [4095, 4096]}]),
        (("problems", "overlaid"), ["tokens differ"]),
    ],
)
def test_an_older_run_is_checked_as_far_as_it_can_be(path: tuple[str, ...], value: Any) -> None:
    run = runs.engine()
    assert edited(run) == []
    place = run["rows"]["prime-rl-2772"]["cases"]["presence"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert edited(run)


def test_children_are_kept_with_digests_of_their_outputs() -> None:
    child = runs.child("stock", 1, "row", 100.0)
    kept = json.loads(json.dumps(recorded(child)))
    assert kept["cases"]["none"]["digests"]["tokens"].startswith("sha256:")
    (again,) = restored([kept])
    assert again.cases["none"].figures == child.cases["none"].figures
    one, other = runs.packed(1, 2), runs.packed(1, 3)
    assert outputs.digest(one) != outputs.digest(other)
    assert outputs.where(one, other) == "request 0, position 1: 2 against 3"
    assert "against sha256:" in outputs.where(outputs.digest(one), outputs.digest(other))


def test_the_environment_that_matters_is_shown() -> None:
    run = runs.measured()
    assert "Environment: VLLM_READINESS was not set." in markdown(run)
    run["environment"] = {"VLLM_READINESS": "-fixes", "OMP_NUM_THREADS": "1"}
    assert "Environment: `VLLM_READINESS=-fixes`, `OMP_NUM_THREADS=1`." in markdown(run)
    assert "VLLM_READINESS is not recorded" in markdown(runs.engine())
