"""Whole reviews, of releases with one change each."""

import html
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import OverlayError
from packaging.version import Version
from review import __main__ as program
from review import page, released, review, wheels
from review.fixes import Mend
from review.wheels import Release
from support import series
from support.series import BASE, CHANGES, PATH, RUNNER
from support.sites import REPO, UPSTREAM, snapshot

# One change each.


def synthetic(text: str, version: str = "0.23.0") -> Release:
    upstream = series.upstream({**BASE, PATH: text})
    return Release(version, f"vllm-{version}-py3-none-any.whl", "a" * 64, "a test's", upstream)


def reviewed(root: Path, text: str) -> dict[str, Any]:
    overlay = series.checkout(root / "checkout")
    return review.of_release(
        overlay, series.upstream(BASE), synthetic(text), root / "reviews", mends={}
    )


VERDICTS = {
    "nothing": "unchanged",
    "a line above": "needs eyes",
    "a line below": "needs eyes",
    "a change two lines from a seam": "needs eyes",
    "a renamed function": "needs eyes",
    "a new parameter": "needs eyes",
    "our own change": "needs eyes",
    "the function is gone": "needs eyes",
    "a moved block": "conflicts",
    "a moved call": "conflicts",
    "a deleted call": "conflicts",
    "a change next to a seam": "conflicts",
    "a change inside a seam": "conflicts",
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_comes_to_one_verdict(name: str, tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES[name].edit(RUNNER))
    assert result["verdict"] == VERDICTS[name]


def fates(result: dict[str, Any]) -> dict[str, str]:
    return {name["name"]: name["fate"] for name in result["names"] if name["fate"] != "same"}


@pytest.mark.parametrize(
    ("old", "new", "name", "fate"),
    [
        ("def prepare(self, rows)", "def prepare(self, rows, *, strict)", "Runner.prepare",
         "signature"),
        ("return len(self.rows)", "return -len(self.rows)", "Runner.prepare", "body"),
        ("LIMIT = 8", "BOUND = 8", "LIMIT", "gone"),
        ("def sample(", "def draw(", "Runner.sample", "gone"),
    ],
)  # fmt: skip
def test_changed_names_need_eyes(old: str, new: str, name: str, fate: str, tmp_path: Path) -> None:
    """Every patch applies, and each of these would break at run time."""
    result = reviewed(tmp_path, series.replaced(RUNNER, (old, new)))
    assert fates(result) == {f"vllm.v1.runner.{name}": fate}
    assert {patch["verdict"] for patch in result["patches"]} == {"applies"}
    assert result["verdict"] == "needs eyes"


def test_an_obsolete_patch_is_left_out_and_warns(tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES["our own change"].edit(RUNNER))
    (warning, *_) = result["warnings"]
    assert warning.startswith("0001 is obsolete")
    assert "Drop-When field: text" in warning
    assert result["candidate"]["patches"] == ["0001-edit-2.patch", "0002-edit-3.patch"]


@pytest.mark.parametrize("partly", [False, True])
def test_patches_that_are_not_needed_need_eyes(partly: bool, tmp_path: Path) -> None:
    """No name has changed; part of a patch, or all of it, is in the release."""
    ours = (("LIMIT = 8\n", "LIMIT = 8\nBOUND = 9\n"), ('"""Runs."""', '"""Ran."""'))
    heads = [t.partition("\n\n\nclass")[0] for t in (RUNNER, series.replaced(RUNNER, *ours))]
    overlay = series.checkout(tmp_path / "checkout", ((heads[0], heads[1]),))
    release = synthetic(series.replaced(RUNNER, *ours[partly:]))
    result = review.of_release(overlay, series.upstream(BASE), release, tmp_path / "out", mends={})
    assert [patch["verdict"] for patch in result["patches"]] == ["moved" if partly else "obsolete"]
    assert fates(result) == {}
    assert result["warnings"]
    assert result["verdict"] == "needs eyes"


def test_a_hunk_that_merges_into_another_function_warns(tmp_path: Path) -> None:
    edits = (("def finish(", "def other("), ("def drop(", "def finish("))
    result = reviewed(tmp_path, series.replaced(RUNNER, *edits))
    assert any("merges into Runner.other" in warning for warning in result["warnings"])


def test_a_fix_that_the_release_has_needs_eyes(tmp_path: Path) -> None:
    """Every patch applies and no name has changed: only the table knows of the mend."""
    overlay = series.checkout(tmp_path / "checkout")
    mends = {
        "gone": Mend(since="0.23.0", patches=("edit-1",)),
        "needed": Mend(since="0.24.0", patches=("edit-2",)),
    }
    base, release = series.upstream(BASE), synthetic(RUNNER)
    result = review.of_release(overlay, base, release, tmp_path / "out", mends=mends)
    assert {patch["verdict"] for patch in result["patches"]} == {"applies"}
    assert [(fix["name"], fix["has"]) for fix in result["fixes"]] == [
        ("gone", "mended"),
        ("needed", "not mended"),
    ]
    assert result["verdict"] == "needs eyes"
    (warning,) = result["warnings"]
    assert warning.startswith("the fix gone is mended (since 0.23.0): drop it; drop 0001")
    where = tmp_path / "out" / "0.23.0"
    assert "## Fixes: 1 of 2 can go" in (where / review.MARKDOWN).read_text()
    assert "Fixes: 1 of 2 can go" in (where / review.PAGE).read_text()


# The files and the program.


def test_a_folder_that_is_no_review_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "reviews" / "0.23.0" / "precious"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = snapshot(tmp_path / "reviews")
    with pytest.raises(OverlayError, match="is no review"):
        reviewed(tmp_path, RUNNER)
    assert snapshot(tmp_path / "reviews") == before


def test_a_review_replaces_the_one_before(tmp_path: Path) -> None:
    reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    where = tmp_path / "reviews" / "0.23.0"
    assert (where / review.CANDIDATE / "conflicts").exists()
    result = reviewed(tmp_path, RUNNER)
    assert not (where / review.CANDIDATE / "conflicts").exists()
    assert json.loads((where / review.JSON).read_text()) == result
    assert {file.name for file in where.iterdir()} == {
        review.JSON,
        review.MARKDOWN,
        review.PAGE,
        review.CANDIDATE,
    }


def test_a_review_with_conflicts_stays_beside_another_one(tmp_path: Path) -> None:
    """Somebody may have the page open, and resolve them."""
    folder = tmp_path / "reviews"

    def names() -> list[str]:
        return sorted(file.name for file in folder.iterdir())

    open_one = reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    assert names() == ["0.23.0"]  # it says the same
    reviewed(tmp_path, RUNNER)
    assert names() == ["0.23.0", "0.23.0-before"]
    kept = folder / "0.23.0-before"
    assert json.loads((kept / review.JSON).read_text()) == open_one
    assert (kept / review.CANDIDATE / "conflicts").is_dir()
    reviewed(tmp_path, CHANGES["a line above"].edit(RUNNER))  # nothing was open in between
    assert json.loads((kept / review.JSON).read_text()) == open_one
    reviewed(tmp_path, CHANGES["a moved call"].edit(RUNNER))
    newer = reviewed(tmp_path, CHANGES["a deleted call"].edit(RUNNER))
    assert names() == ["0.23.0", "0.23.0-before"]
    assert json.loads((kept / review.JSON).read_text())["verdict"] == newer["verdict"]


def test_a_review_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed(tmp_path, RUNNER)
    before = snapshot(tmp_path)

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "render", fail)
    with pytest.raises(KeyboardInterrupt):
        reviewed(tmp_path, CHANGES["a line above"].edit(RUNNER))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "code"), {"nothing": 0, "a new parameter": 10, "a moved call": 11}.items()
)
def test_the_program_reports_the_review(
    name: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    series.checkout(tmp_path / "checkout")
    monkeypatch.setattr(program, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(program, "_base", lambda *_: series.upstream(BASE))
    monkeypatch.setattr(wheels, "obtain", lambda *_: synthetic(CHANGES[name].edit(RUNNER)))
    monkeypatch.setattr(review, "of_release", partial(review.of_release, mends={}))
    command = ["release", "0.23.0", "--out", str(tmp_path / "out")]
    assert program.main([*command, "--check"]) == code
    capsys.readouterr()
    # A review that was made is no failure, whatever it says.
    assert program.main(command) == 0
    result = json.loads((tmp_path / "out" / "0.23.0" / review.JSON).read_text())
    printed = capsys.readouterr().out
    assert f"vLLM 0.23.0: {result['verdict']}\n" in printed
    for patch in result["patches"]:
        because = re.escape(patch["because"])
        line = rf"^  {patch['verdict']} +{patch['name'][:4]} .*{because}$"
        assert re.search(line, printed, re.MULTILINE)
    for warning in result["warnings"]:
        assert f"warning: {warning}\n" in printed


def test_the_latest_release_is_called_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In messages, on the page, in the directory, and in the command that repeats the review."""
    series.checkout(tmp_path / "checkout")
    monkeypatch.setattr(program, "ROOT", tmp_path / "checkout")
    monkeypatch.setattr(program, "_base", lambda *_: series.upstream(BASE))
    monkeypatch.setattr(released, "final", lambda _: [Version("0.23.0"), Version("0.24.0")])
    monkeypatch.setattr(wheels, "obtain", lambda wanted, *_: synthetic(RUNNER, wanted))
    program.main(["release", "latest", "--out", str(tmp_path / "out")])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["0.24.0"]
    assert capsys.readouterr().out.startswith("vLLM 0.24.0: ")
    written = [tmp_path / "out" / "0.24.0" / name for name in (review.PAGE, review.JSON)]
    assert all("RELEASE=0.24.0" in file.read_text() for file in written)
    assert not any("latest" in file.read_text() for file in written)


def test_the_overlay_against_its_own_release(tmp_path: Path) -> None:
    """The active environment is the base if nothing is named."""
    command = [sys.executable, "-m", "review", "diff", "--json", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    done = [
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env=environment | {"VIRTUAL_ENV": env},
        )
        for env in (str(tmp_path / "none"), str(REPO / "build" / "env"))
    ]
    assert str(tmp_path / "none") in done[0].stderr
    assert done[1].returncode == 0, done[1].stderr
    assert [file.name for file in tmp_path.iterdir()] == [review.OWN]
    result = json.loads((tmp_path / review.OWN / review.JSON).read_text())
    assert result["own"] is True
    assert result["fixes"] == []
    assert json.loads(done[1].stdout) == result
    assert {patch["verdict"] for patch in result["patches"]} == {"applies"}
    text = html.unescape((tmp_path / review.OWN / review.PAGE).read_text())
    assert all(patch["title"] in text for patch in result["patches"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("release", ""), "RELEASE is empty"),
        (("release", "0.22.999"), "0.22.999"),
        (("release", "no/such.whl"), "no/such.whl"),
        (("release", "https://example.org/v.whl"), "https://example.org/v.whl: is an address"),
        (("release", "0.22.1", "--site", "x", "--venv", "y"), "VENV and SITE name two targets"),
        (("rebase", ""), "RELEASE is empty"),
        (("release", "0.23.0", "--site", "/no/such/site"), "/no/such/site"),
    ],
)
def test_a_refusal(
    arguments: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    if "--site" in arguments:
        monkeypatch.setattr(wheels, "obtain", lambda *_: synthetic(RUNNER))
    out = ("--out", str(tmp_path)) if arguments[0] == "release" else ()
    site = () if "--site" in arguments else ("--site", str(UPSTREAM))
    assert program.main([*arguments, *site, *out]) not in (0, 1, 10, 11)
    printed = capsys.readouterr().err
    assert reason in printed
    assert "next" in printed
