"""A run is decided before it is measured, and is published as it was decided, or not at all."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench import measurements
from bench.compare import manifest
from bench.compare.machine import overlay_version
from bench.errors import Failure
from bench.reports.markdown import markdown
from support import runs
from support.checkouts import git

TEXT = "<!-- slower -->\n\n<!-- run: new -->\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "new.json").write_text(json.dumps(runs.measured()))
    return tmp_path


def change(folder: Path, alter: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    run = runs.measured()
    alter(run)
    (folder / "new.json").write_text(json.dumps(run))
    return run


def without(kind: str, name: str) -> Callable[[dict[str, Any]], None]:
    """Leave a row out, or a case and what its children say of it."""

    def leave_out(run: dict[str, Any]) -> None:
        if kind == "row":
            run["rows"]["other"] = run["rows"].pop(name)
            return
        row = run["rows"]["row"]
        for cases in (row["cases"], *(child["cases"] for child in row["children"])):
            del cases[name]
        for figures in row["cases"].values():
            figures["figures"] = {k: v for k, v in figures["figures"].items() if " / " not in k}

    return leave_out


@pytest.mark.parametrize(
    ("alter", "told"),
    [
        (without("row", "row"), "the row row was left out"),
        (without("row", "row"), "the row other was not decided"),
        (without("case", "presence"), "row has the cases none, not none, presence"),
        (lambda run: run["manifest"].update(rounds=6), "row has the rounds 5, not 6"),
        (
            lambda run: run["manifest"]["rows"]["row"].update(sides=["stock", "overlaid", "mrv2"]),
            "row has the sides stock, overlaid, not stock, overlaid, mrv2",
        ),
        (
            lambda run: run["digests"].update(overlaid="00" * 32),
            "the digest of overlaid is not the one that was decided",
        ),
    ],
)
def test_a_run_that_is_not_as_decided_is_not_published_and_says_so(
    folder: Path, alter: Callable[[dict[str, Any]], object], told: str
) -> None:
    assert "NOT AS DECIDED" not in markdown(runs.measured())
    measurements.page(TEXT, folder)
    run = change(folder, alter)
    assert told in [*manifest.differences(run)]
    assert f"**NOT AS DECIDED**: {told}." in markdown(run)
    with pytest.raises(Failure, match=r"new\.json (is not what its manifest|was edited)"):
        measurements.page(TEXT, folder)


@pytest.mark.parametrize(
    ("decided", "told"),
    [
        ({"commit": None}, "it was not measured from a commit"),
        ({"changed": ["VERSION_PIN", "a"]}, "files differed from commit ab.*: VERSION_PIN, a"),
    ],
)
def test_what_no_commit_holds_is_not_published(
    folder: Path, decided: dict[str, Any], told: str
) -> None:
    change(folder, lambda run: run["manifest"].update(decided))
    with pytest.raises(Failure, match=told):
        measurements.page(TEXT, folder)


@pytest.mark.parametrize(
    ("limit", "seconds", "told"),
    [
        (500.0, 431.0, []),
        (500.0, 400.0, ["row has the rounds 5, not 6"]),  # a sixth of 80 s would have ended in time
        (None, 431.0, ["row has the rounds 5, not 6"]),
    ],
)
def test_rounds_may_be_fewer_where_the_time_that_was_decided_was_over(
    folder: Path, limit: float | None, seconds: float, told: list[str]
) -> None:
    def shorten(run: dict[str, Any]) -> None:
        run["seconds"] = seconds
        run["manifest"] |= {"rounds": 6} | ({} if limit is None else {"limit": limit})

    run = change(folder, shorten)
    assert [*manifest.differences(run)] == told
    line = "No round was begun that would have ended after 500 s."
    assert (line in markdown(run)) == (limit is not None)
    run["complete"] = False
    (folder / "new.json").write_text(json.dumps(run))
    with pytest.raises(Failure, match="cut off"):
        measurements.page(TEXT, folder)


def test_an_edited_run_is_not_published(folder: Path) -> None:
    def edit(run: dict[str, Any]) -> None:
        run["rows"]["row"]["cases"]["none"]["figures"]["tokens/s"]["ratios"]["overlaid"] = 9.0

    change(folder, edit)
    with pytest.raises(Failure, match="was edited: row: none: figures, tokens/s, ratios"):
        measurements.page(TEXT, folder)


def test_the_page_says_where_an_older_run_of_a_row_says_otherwise(folder: Path) -> None:
    def slower(run: dict[str, Any], device: str) -> None:
        """An older run of the same row, in which the overlaid side lost."""
        run["schema"], run["date"], run["machine"]["device"] = 1, "2026-11-01", device
        for values in run["rows"]["row"]["cases"]["none"]["figures"].values():
            values["rounds"]["overlaid"] = [one * 0.9 for one in values["rounds"]["stock"]]
            values["overlaid"] = values["stock"] * 0.9
            values["ratios"] = dict.fromkeys(values["ratios"], 0.9)

    text = TEXT + "\n<!-- run: old -->\n"
    for device, told in ((runs.head("engine")["machine"]["device"], 1), ("CPU", 0)):
        old = runs.measured()
        slower(old, device)
        (folder / "old.json").write_text(json.dumps(old))
        page = measurements.page(text, folder)
        line = "- none: the run old of 2026-11-01 says otherwise of tokens/s: 0.900, and not 3.8"
        assert page.count(line) == told
        assert "the run new" not in page


def test_a_run_of_another_release_says_which(folder: Path) -> None:
    current = overlay_version()
    told = f"This is a run of overlay 0.5.0; the current one is {current}."
    assert told in measurements.page(TEXT, folder)
    change(folder, lambda run: run["versions"].update(overlay=current))
    assert "This is a run of overlay" not in measurements.page(TEXT, folder)


def test_the_commit_and_the_files_that_differ_from_it_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def decided() -> tuple[Any, Any]:
        made = manifest.decide("command", 5, {}, {})
        return made["commit"], made["changed"]

    assert decided() == (None, [])
    git(tmp_path, "init", "--quiet")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    commit, changed = decided()
    assert (len(commit), changed) == (40, [])
    (tmp_path / "file").write_text("two")
    assert decided() == (commit, ["file"])
    one = manifest.decide("command", 5, {}, {})
    assert manifest.digest(one) != manifest.digest({**one, "rounds": 6})
