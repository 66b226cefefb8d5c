"""docs/measurements.md is what the committed runs make it, and shows no run that misleads."""

import hashlib
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import measurements
from bench.errors import Failure
from bench.reports import figures
from bench.reports.run_file import load
from overlay import pin
from overlay.source import PROVENANCE
from support import runs
from support.sites import REPO

COMMITTED = {file.stem: load(file) for file in measurements.RUNS.glob("*")}
TEXT = "# Title\n\n<!-- slower -->\n\n<!-- run: engine -->\n\n<!-- run: table -->\n"


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=True).stdout


def digest_of(pinned: bytes) -> str:
    """The digest of an installation that the overlay with this pin was laid over."""
    files = dict(pin.loads(pinned.decode()).result)
    files[f"{PROVENANCE}/{pin.NAME}"] = hashlib.sha256(pinned).hexdigest()
    lines = (f"{sha256}  {path}\n" for path, sha256 in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_each_run_measured_an_overlay_that_was_committed() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone does not have the pins of earlier commits")
    commits = git("log", "--format=%H", "--", pin.NAME).decode().split()
    known = {digest_of(git("show", f"{commit}:{pin.NAME}")) for commit in commits}
    measured = {run["digests"]["overlaid"] for run in COMMITTED.values()}
    assert measured
    assert measured <= known


@pytest.mark.parametrize("name", [n for n, run in COMMITTED.items() if run["kind"] == "engine"])
def test_medians_and_ratios_are_those_of_the_rounds(name: str) -> None:
    ratios = 0
    for row in COMMITTED[name]["rows"].values():
        for case in row["cases"].values():
            for label, values in case["figures"].items():
                extreme = label.endswith("fastest round") or label == "ITL max"
                typical = max if extreme else statistics.median
                for side in row["sides"]:
                    rounds = [value for value in values["rounds"][side] if value is not None]
                    assert values[side] == (typical(rounds) if rounds else None)
                for side, ratio in values["ratios"].items():
                    if ratio is not None:
                        assert not figures.reasons(case, side)
                        assert ratio == pytest.approx(values[side] / values["stock"])
                        ratios += 1
    assert ratios


@pytest.mark.parametrize("name", [n for n, run in COMMITTED.items() if run["kind"] == "table"])
def test_a_row_s_ratios_are_those_of_its_own_figures(name: str) -> None:
    ratios = 0
    for row in COMMITTED[name]["rows"]:
        line = dict(zip(COMMITTED[name]["columns"], row, strict=True))
        for column, cell in line.items():
            one, _, other = column.partition(" / ")
            if other and cell is not None and one in line:
                ratio = cell[0] if isinstance(cell, list) else cell
                assert ratio == line[one] / line[other], (line["case"], line["figure"])
                ratios += 1
    assert ratios


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a run of each kind."""
    for name, run in (("engine", runs.engine()), ("table", runs.table())):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    return tmp_path


def change(folder: Path, name: str, alter: Callable[[dict[str, Any]], object]) -> None:
    file = folder / f"{name}.json"
    run = json.loads(file.read_text())
    alter(run)
    file.write_text(json.dumps(run))


def test_a_refused_ratio_is_not_shown_and_its_reason_is(folder: Path) -> None:
    def refuse(run: dict[str, Any]) -> None:
        for label in ("no history", "mixed, batch 8"):
            runs.refuse(run["rows"]["issue-43450"]["cases"][label], "overlaid", "tokens differ")

    change(folder, "engine", refuse)
    page = measurements.page(TEXT, folder)
    assert "| no history | ITL p50 | 6.680 | 6.600 | 6.560 | refused | 0.982 ~ |" in page
    assert "- no history; mixed, batch 8: overlaid: tokens differ." in page


def test_what_slices_say_is_shown(folder: Path) -> None:
    def take_turns(run: dict[str, Any]) -> None:
        speeds = [[100.0, 101.0]] * 5
        case = run["rows"]["issue-43450"]["cases"]["no history"]
        case["speeds"] = dict.fromkeys(("stock", "overlaid", "mrv2"), speeds)

    change(folder, "engine", take_turns)
    line = "- no history: overlaid 1.000 (1.000 to 1.000), mrv2 1.000 (1.000 to 1.000)"
    assert line in measurements.page(TEXT, folder).splitlines()


def test_what_is_slower_comes_first_and_worst_first(folder: Path) -> None:
    def plant(run: dict[str, Any]) -> None:
        of_case = run["rows"]["issue-43450"]["cases"]["no history"]["figures"]
        for figure, rounds in (
            ("tokens/s", [0.5] * 5),  # half as fast
            ("ITL p99", [1.5] * 5),
            ("ITL p50", [0.9, 1.04, 1.1, 0.95, 1.05]),  # may be noise, and is more than 3%
            ("sample_tokens p50", [0.9, 1.02, 1.1, 0.95, 1.05]),  # may be noise
        ):
            median = statistics.median(rounds)
            of_case[figure] |= {"stock": 1.0, "overlaid": median, "ratios": {"overlaid": median}}
            of_case[figure]["rounds"] |= {"stock": [1.0] * 5, "overlaid": rounds}

    change(folder, "engine", plant)
    listed = measurements.page(TEXT, folder).split("\n\n")[1].splitlines()[2:]
    ours = [line.split(" | ")[2:] for line in listed if "get_output" not in line]
    assert ours[:3] == [
        ["tokens/s", "1.000", "0.5000", "0.500 |"],
        ["ITL p99", "1.000", "1.500", "1.500 |"],
        ["ITL p50", "1.000", "1.040", "1.040 ~ |"],
    ]
    assert not any("sample_tokens" in line for line in listed)


@pytest.mark.parametrize(
    ("name", "alter", "sentence"),
    [
        ("engine", lambda run: run.update(complete=False), "cut off"),
        ("engine", lambda run: run.update(errors=["a child failed"]), "failed in part"),
        ("engine", lambda run: run["rows"]["cpu-like"].update(rounds=2), "fewer than 3 rounds"),
    ],
)
def test_a_run_that_would_mislead_is_refused(
    folder: Path, name: str, alter: Callable[[dict[str, Any]], object], sentence: str
) -> None:
    change(folder, name, alter)
    with pytest.raises(Failure, match=sentence):
        measurements.page(TEXT, folder)


def test_the_template_names_every_run_and_no_other(folder: Path) -> None:
    (folder / "other.json").write_text("{}")
    with pytest.raises(Failure, match="names no run other"):
        measurements.page(TEXT, folder)
    (folder / "other.json").unlink()
    (folder / "table.json").unlink()
    with pytest.raises(Failure, match=r"no run .*table\.json"):
        measurements.page(TEXT, folder)


def test_the_page_is_what_the_runs_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measurements.main(["--check"]) == 0
    whole = measurements.PAGE.read_text()
    page = tmp_path / "page.md"
    page.write_text(whole[:-20])
    monkeypatch.setattr(measurements, "PAGE", page)
    assert measurements.main(["--check"]) == 1
    assert f"{page} is out of date" in capsys.readouterr().err
    assert page.read_text() == whole[:-20]
    assert measurements.main([]) == 0
    assert page.read_text() == whole
