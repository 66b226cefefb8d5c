"""Whole reviews: of real releases, and of made-up ones with one change each."""

import html
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from overlay import pin
from overlay.errors import OverlayError
from overlay.patches import Series
from overlay.pin import sha256
from review import merging, page, review, wheels
from review.__main__ import main as program_main
from review.uses import Use
from review.wheels import Release
from series.upstream import Upstream
from support import series
from support.cherry_pick import assert_same_as_git
from support.releases import release
from support.series import BASE, CHANGES, PATH, RUNNER
from support.sites import OVERLAY, REPO, UPSTREAM, snapshot

REAL = ("0.22.1", "0.23.0", "0.33.0")

Real = tuple[Release, dict[str, Any], Path]


@pytest.fixture(scope="module")
def reviews(
    base: Upstream, overlay_uses: list[Use], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Real]:
    """Reviews of real releases, each made once: the release, review.json, and its folder."""
    folder = tmp_path_factory.mktemp("reviews")

    @cache
    def reviewed(version: str) -> Real:
        wheel = release(version)
        result = review.of_release(OVERLAY, base, wheel, folder, overlay_uses)
        return wheel, result, folder / wheel.version

    return reviewed


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, reviews: Callable[[str], Real]) -> Real:
    return reviews(request.param)


def test_verdicts_are_those_of_git(real: Real, base: Upstream, tmp_path: Path) -> None:
    wheel, result, _ = real
    merged = merging.merge(OVERLAY.series, base, wheel.upstream)
    before, after = (
        {path: upstream.read(path) for path in OVERLAY.targets}
        for upstream in (base, wheel.upstream)
    )
    assert_same_as_git(tmp_path / "tree", OVERLAY.series, before, after, merged)
    verdicts = [patch["verdict"] for patch in result["patches"]]
    assert verdicts == [judged.verdict for judged in merged.patches]
    assert result["candidate"]["conflicts"] == sorted(merged.conflicts)


def test_the_candidate_applies_to_the_release(real: Real, tmp_path: Path) -> None:
    wheel, result, folder = real
    candidate, described = folder / review.CANDIDATE, result["candidate"]
    names = (candidate / "patches" / "series").read_text().split()
    for name in names:
        file = candidate / "patches" / name
        complete = name in described["patches"]
        assert file.exists() is complete
        data = (file if complete else file.with_name(f"{name}.incomplete")).read_bytes()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "series").write_text("".join(f"{name}\n" for name in names))
    patches = Series.load(tmp_path)
    assert sorted(described["vendored"] + described["conflicts"]) == OVERLAY.targets
    for path in described["vendored"]:
        overlaid = patches.apply(path, wheel.upstream.read(path))
        assert overlaid == (candidate / "vendor_overlay" / path).read_bytes()
        assert patches.reverse(path, overlaid) == wheel.upstream.read(path)
    assert (candidate / pin.NAME).exists() is (described["conflicts"] == [])
    # Conflicts are beside it, with git's markers.
    marked = {
        (patch["name"].removesuffix(".patch"), file["path"])
        for patch in result["patches"]
        for file in patch["files"]
        if patch["verdict"] == "conflicts"
        and any(hunk["verdict"] in ("conflicts", "gone") for hunk in file["hunks"])
    }
    conflicts = candidate / "conflicts"
    files = {tuple(str(f.relative_to(conflicts)).split("/", 1)) for f in conflicts.rglob("*.py")}
    assert files == marked
    for name, path in files:
        assert "<" * 31 + " release\n" in (conflicts / name / path).read_text()


def test_a_release_with_the_same_files_is_clean(reviews: Callable[[str], Real]) -> None:
    _, result, folder = reviews("0.22.1")
    assert result["verdict"] == "clean"
    assert {patch["verdict"] for patch in result["patches"]} == {"applies"}
    assert {name["fate"] for name in result["names"]} == {"same"}
    assert len(result["names"]) > 100
    candidate = folder / review.CANDIDATE
    for file in (REPO / "patches").iterdir():
        assert (candidate / "patches" / file.name).read_bytes() == file.read_bytes()
    new = pin.loads((candidate / pin.NAME).read_text())
    assert new.release == "0.22.1"
    assert (new.upstream, new.result) == (OVERLAY.pin.upstream, OVERLAY.pin.result)
    for path in OVERLAY.targets:
        vendored = (candidate / "vendor_overlay" / path).read_bytes()
        assert sha256(vendored) == OVERLAY.pin.result[path]


def test_the_next_release_conflicts(reviews: Callable[[str], Real]) -> None:
    """As docs/releases.md walks through it."""
    _, result, folder = reviews("0.23.0")
    assert result["verdict"] == "conflicts"
    conflicts = [p["name"][:4] for p in result["patches"] if p["verdict"] == "conflicts"]
    text = " ".join((REPO / "docs" / "releases.md").read_text().split())
    assert f"that {' and '.join(conflicts)} conflict" in text
    changed = {name["name"] for name in result["names"] if name["fate"] != "same"}
    assert "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params" in changed
    text = (folder / review.MARKDOWN).read_text()
    for patch in result["patches"]:
        assert patch["because"] in text.replace("\\", "")


# One change each.


def synthetic(text: str, version: str = "0.23.0") -> Release:
    upstream = series.upstream({**BASE, PATH: text})
    return Release(version, f"vllm-{version}-py3-none-any.whl", "a" * 64, "a test's", upstream)


def reviewed(root: Path, text: str) -> dict[str, Any]:
    overlay = series.checkout(root / "checkout")
    return review.of_release(overlay, series.upstream(BASE), synthetic(text), root / "reviews")


VERDICTS = {
    "nothing": "clean",
    "a line above": "clean",
    "a line below": "clean",
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
    result = review.of_release(overlay, series.upstream(BASE), release, tmp_path / "out")
    assert [patch["verdict"] for patch in result["patches"]] == ["moved" if partly else "obsolete"]
    assert fates(result) == {}
    assert result["warnings"]
    assert result["verdict"] == "needs eyes"


def test_a_hunk_that_merges_into_another_function_warns(tmp_path: Path) -> None:
    edits = (("def finish(", "def other("), ("def drop(", "def finish("))
    result = reviewed(tmp_path, series.replaced(RUNNER, *edits))
    assert any("merges into Runner.other" in warning for warning in result["warnings"])


# The files and the program.


def test_a_folder_that_is_no_review_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "reviews" / "0.23.0" / "precious"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = snapshot(tmp_path / "reviews")
    with pytest.raises(OverlayError, match="is no review"):
        reviewed(tmp_path, RUNNER)
    assert snapshot(tmp_path / "reviews") == before


def test_a_review_replaces_the_one_before_and_leaves_nothing_else(tmp_path: Path) -> None:
    reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    where = tmp_path / "reviews" / "0.23.0"
    assert (where / review.CANDIDATE / "conflicts").exists()
    result = reviewed(tmp_path, RUNNER)
    assert not (where / review.CANDIDATE / "conflicts").exists()
    assert [file.name for file in (tmp_path / "reviews").iterdir()] == ["0.23.0"]
    assert json.loads((where / review.JSON).read_text()) == result
    assert {file.name for file in where.iterdir()} == {
        review.JSON,
        review.MARKDOWN,
        review.PAGE,
        review.CANDIDATE,
    }


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


def program(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "review", *(str(argument) for argument in arguments)]
    environment = os.environ | {"PYTHONPATH": str(REPO / "scripts")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_program_reports_the_review(
    reviews: Callable[[str], Real],
    overlay_uses: list[Use],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel, result, _ = reviews("0.23.0")
    monkeypatch.setattr(wheels, "obtain", lambda *_: wheel)
    monkeypatch.setattr(review, "uses_of", lambda *_: overlay_uses)
    arguments = ["release", "0.23.0", "--site", str(UPSTREAM), "--out", str(tmp_path)]
    assert program_main(arguments) == 11
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "0.23.0" / review.JSON).read_text()) == result
    assert f"vLLM 0.23.0: {result['verdict']}" in printed
    for patch in result["patches"]:
        because = re.escape(patch["because"])
        line = rf"^  {patch['verdict']} +{patch['name'][:4]} .*{because}$"
        assert re.search(line, printed, re.MULTILINE)


def test_the_overlay_against_its_own_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active environment is the base if nothing is named."""
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "none"))
    assert str(tmp_path / "none") in program("diff", "--out", tmp_path).stderr
    monkeypatch.setenv("VIRTUAL_ENV", str(REPO / "build" / "env"))
    done = program("diff", "--json", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [review.OWN]
    result = json.loads((tmp_path / review.OWN / review.JSON).read_text())
    assert result["own"] is True
    assert json.loads(done.stdout) == result
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
    assert program_main([*arguments, *site, *out]) not in (0, 1, 10, 11)
    printed = capsys.readouterr().err
    assert reason in printed
    assert "next" in printed
