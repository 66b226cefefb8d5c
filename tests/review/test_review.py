"""Whole reviews: of the releases that there are, and of some with one change each."""

import html
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from overlay import author, pin
from overlay.errors import OverlayError
from overlay.installation import locate
from overlay.patches import Series
from overlay.pin import sha256
from review import merging, names, page, review, wheels
from review.__main__ import main as program_main
from review.wheels import Release
from support import series
from support.picks import held_against_git
from support.releases import release
from support.series import BASE, CHANGES, PATH, RUNNER
from support.sites import OVERLAY, REPO, UPSTREAM, snapshot

REAL = ("0.21.0", "0.22.1", "0.23.0", "0.33.0")
PROGRAM = REPO / "scripts" / "review"


@cache
def base() -> author.Upstream:
    return author.from_installation(locate(site=str(UPSTREAM)), OVERLAY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reviews")


Real = tuple[Release, dict[str, Any], Path]


@pytest.fixture(scope="module")
def reviews(folder: Path) -> Iterator[Callable[[str], Real]]:
    """Reviews of releases that there are: each with its wheel, and where it lies.

    What the overlay relies on hangs on its own release alone, and is found once.
    """
    with pytest.MonkeyPatch.context() as patch:
        once = cache(lambda: names.relied_on(*asked[0]))
        asked: list[Any] = []

        def relied_on(*arguments: Any) -> Any:
            asked.append(arguments)
            return once()

        @cache
        def reviewed(version: str) -> Real:
            wheel = release(version)
            patch.setattr(review, "names", SimpleNamespace(relied_on=relied_on, fates=names.fates))
            try:
                found = review.of_release(OVERLAY, base(), wheel, folder)
            finally:
                patch.undo()
            return wheel, found, folder / wheel.version

        yield reviewed


@pytest.fixture(params=REAL)
def real(request: pytest.FixtureRequest, reviews: Callable[[str], Real]) -> Real:
    return reviews(request.param)


def test_verdicts_are_those_of_git(real: Real, tmp_path: Path) -> None:
    wheel, found, _ = real
    merged = merging.merge(OVERLAY.series, base(), wheel.upstream)
    before, after = (
        {path: upstream.read(path) for path in OVERLAY.targets}
        for upstream in (base(), wheel.upstream)
    )
    held_against_git(tmp_path / "tree", OVERLAY.series, before, after, merged)
    assert [each["verdict"] for each in found["patches"]] == [p.verdict for p in merged.patches]
    assert found["candidate"]["conflicts"] == sorted(merged.conflicts)


def test_the_candidate_applies_to_the_release_afresh(real: Real, tmp_path: Path) -> None:
    wheel, found, where = real
    candidate = where / review.CANDIDATE
    names = (candidate / "patches" / "series").read_text().split()
    for name in names:
        file = candidate / "patches" / name
        whole = name in found["candidate"]["patches"]
        assert file.exists() is whole
        data = (file if whole else file.with_name(f"{name}.incomplete")).read_bytes()
        (tmp_path / name).write_bytes(data)
    (tmp_path / "series").write_text("".join(f"{name}\n" for name in names))
    patches = Series.load(tmp_path)
    described = found["candidate"]
    assert sorted(described["vendored"] + described["conflicts"]) == OVERLAY.targets
    for path in found["candidate"]["vendored"]:
        made = patches.apply(path, wheel.upstream.read(path))
        assert made == (candidate / "vendor_overlay" / path).read_bytes()
        assert patches.reverse(path, made) == wheel.upstream.read(path)
    assert (candidate / pin.NAME).exists() is not found["candidate"]["conflicts"]


def test_conflicts_lie_beside_the_candidate_with_gits_marks(
    real: Real,
) -> None:
    _, found, where = real
    marked = {
        (patch["name"].removesuffix(".patch"), file["path"])
        for patch in found["patches"]
        for file in patch["files"]
        if patch["verdict"] == "conflicts"
        and any(hunk["verdict"] in ("conflicts", "gone") for hunk in file["hunks"])
    }
    conflicts = where / review.CANDIDATE / "conflicts"
    files = {tuple(str(f.relative_to(conflicts)).split("/", 1)) for f in conflicts.rglob("*.py")}
    assert files == marked
    for name, path in files:
        assert (conflicts / name / path).read_text().count("<" * 31 + " release\n") > 0


def test_a_release_with_the_same_files_needs_nothing(reviews: Callable[[str], Real]) -> None:
    _, found, where = reviews("0.22.1")
    assert found["verdict"] == "clean"
    assert {patch["verdict"] for patch in found["patches"]} == {"applies"}
    assert {name["fate"] for name in found["names"]} == {"same"}
    assert len(found["names"]) > 100
    assert review.CODES[found["verdict"]] == 0
    candidate = where / review.CANDIDATE
    for file in (REPO / "patches").iterdir():
        assert (candidate / "patches" / file.name).read_bytes() == file.read_bytes()
    made = pin.loads((candidate / pin.NAME).read_text())
    assert made.release == "0.22.1"
    assert (made.upstream, made.result) == (OVERLAY.pin.upstream, OVERLAY.pin.result)
    for path in OVERLAY.targets:
        vendored = (candidate / "vendor_overlay" / path).read_bytes()
        assert sha256(vendored) == OVERLAY.pin.result[path]


def test_the_drift_is_what_git_counts(real: Real, tmp_path: Path) -> None:
    wheel, found, _ = real
    for each in found["targets"]:
        for name, upstream in (("before", base()), ("after", wheel.upstream)):
            (tmp_path / name).write_bytes(upstream.read(each["path"]))
        command = ["git", "diff", "--no-index", "--numstat", "before", "after"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        counted = [int(number) for number in done.stdout.split()[:2]] or [0, 0]
        assert [each["added"], each["removed"]] == counted


def test_the_next_release_needs_a_person(reviews: Callable[[str], Real]) -> None:
    """What docs/releases.md walks through."""
    _, found, where = reviews("0.23.0")
    assert found["verdict"] == "conflicts"
    conflicts = [p["name"][:4] for p in found["patches"] if p["verdict"] == "conflicts"]
    changed = {name["name"] for name in found["names"] if name["fate"] != "same"}
    told = " ".join((REPO / "docs" / "releases.md").read_text().split())
    assert f"that {' and '.join(conflicts)} conflict" in told
    assert "vllm.v1.worker.gpu.sample.sampler.Sampler.apply_sampling_params" in changed
    text = (where / review.MARKDOWN).read_text()
    for patch in found["patches"]:
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
    found = reviewed(tmp_path, CHANGES[name].edit(RUNNER))
    assert found["verdict"] == VERDICTS[name]


def fates(found: dict[str, Any]) -> dict[str, str]:
    return {name["name"]: name["fate"] for name in found["names"] if name["fate"] != "same"}


def test_what_is_relied_on_is_named(tmp_path: Path) -> None:
    """Every patch applies, and each of these would break at run time."""
    prepare = ("def prepare(self, rows)", "def prepare(self, rows, *, strict)")
    for old, new, name, fate in (
        (*prepare, "Runner.prepare", "signature"),
        ("return len(self.rows)", "return -len(self.rows)", "Runner.prepare", "body"),
        ("LIMIT = 8", "BOUND = 8", "LIMIT", "gone"),
        ("def sample(", "def draw(", "Runner.sample", "gone"),
    ):
        found = reviewed(tmp_path / name / fate, series.replaced(RUNNER, (old, new)))
        assert fates(found) == {f"vllm.v1.runner.{name}": fate}, name
        assert {patch["verdict"] for patch in found["patches"]} <= {"applies"}
        assert found["verdict"] == "needs eyes"


def test_obsolete_says_when_it_was_to_go(tmp_path: Path) -> None:
    found = reviewed(tmp_path, CHANGES["our own change"].edit(RUNNER))
    (warning, *_) = found["warnings"]
    assert warning.startswith("0001 is obsolete")
    assert "It is to go: text" in warning
    assert found["candidate"]["patches"] == ["0001-edit-2.patch", "0002-edit-3.patch"]


def test_obsolete_needs_eyes_though_no_name_has_changed(tmp_path: Path) -> None:
    edit = ("LIMIT = 8\n", "LIMIT = 8\nBOUND = 9\n")
    overlay = series.checkout(tmp_path / "checkout", (edit,))
    text = series.replaced(RUNNER, edit)
    found = review.of_release(overlay, series.upstream(BASE), synthetic(text), tmp_path / "out")
    assert fates(found) == {}
    assert [patch["verdict"] for patch in found["patches"]] == ["obsolete"]
    assert found["verdict"] == "needs eyes"


def test_what_warns_is_not_clean(tmp_path: Path) -> None:
    """The patch merges; what is left of it may make no sense."""
    edits = (("LIMIT = 8", "LIMIT = 8\nBOUND = 9\nFLOOR = 1"), ('"""Runs."""', '"""Ran."""'))
    text = series.replaced(RUNNER, *edits)
    heads = [each.partition("\n\n\nclass")[0] for each in (RUNNER, text)]
    overlay = series.checkout(tmp_path / "checkout", ((heads[0], heads[1]),))
    release = series.replaced(RUNNER, edits[1])
    found = review.of_release(overlay, series.upstream(BASE), synthetic(release), tmp_path / "out")
    assert [patch["verdict"] for patch in found["patches"]] == ["moved"]
    assert fates(found) == {}
    assert found["warnings"]
    assert found["verdict"] == "needs eyes"


def test_a_seam_that_lands_in_another_function_warns(tmp_path: Path) -> None:
    edits = (("def finish(", "def other("), ("def drop(", "def finish("))
    found = reviewed(tmp_path, series.replaced(RUNNER, *edits))
    assert any("comes to stand in Runner.other" in warning for warning in found["warnings"])


# What is written.


def test_what_is_no_review_is_not_replaced(tmp_path: Path) -> None:
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
    found = reviewed(tmp_path, RUNNER)
    assert not (where / review.CANDIDATE / "conflicts").exists()
    assert [file.name for file in (tmp_path / "reviews").iterdir()] == ["0.23.0"]
    assert json.loads((where / review.JSON).read_text()) == found
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
    command = [sys.executable, str(PROGRAM), *(str(each) for each in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_program_ends_with_what_it_found(
    reviews: Callable[[str], Real],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel, found, _ = reviews("0.23.0")
    monkeypatch.setattr(wheels, "obtain", lambda *_: wheel)
    monkeypatch.setattr(review, "_names", lambda *_: found["names"])
    arguments = ["release", wheel.version, "--site", str(UPSTREAM), "--out", str(tmp_path)]
    assert program_main(arguments) == 11
    said = capsys.readouterr().out
    assert json.loads((tmp_path / wheel.version / review.JSON).read_text()) == found
    assert f"vLLM {wheel.version}: {found['verdict']}" in said
    for patch in found["patches"]:
        because = re.escape(patch["because"])
        line = rf"^  {patch['verdict']} +{patch['name'][:4]} .*{because}$"
        assert re.search(line, said, re.MULTILINE)


def test_the_active_environment_is_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "none"))
    done = program("diff", "--out", tmp_path)
    assert str(tmp_path / "none") in done.stderr
    monkeypatch.setenv("VIRTUAL_ENV", str(REPO / "build" / "env"))
    assert program("diff", "--out", tmp_path).returncode == 0


def test_the_overlay_against_its_own_release(tmp_path: Path) -> None:
    done = program("diff", "--site", UPSTREAM, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [review.OWN]
    found = json.loads((tmp_path / review.OWN / review.JSON).read_text())
    assert found["own"] is True
    assert {patch["verdict"] for patch in found["patches"]} == {"applies"}
    text = html.unescape((tmp_path / review.OWN / review.PAGE).read_text())
    assert all(patch["title"] in text for patch in found["patches"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("release", ""), "RELEASE is empty"),
        (("release", "0.22.999"), "0.22.999"),
        (("release", "no/such.whl"), "no/such.whl"),
        (
            ("release", "https://example.org/vllm.whl"),
            "https://example.org/vllm.whl: is an address",
        ),
        (("release", "0.22.1", "--site", "x", "--venv", "y"), "VENV and SITE name two targets"),
        (("rebase", ""), "RELEASE is empty"),
        (("release", "0.23.0", "--site", "/no/such/site"), "/no/such/site"),
    ],
)
def test_a_refusal_says_why(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    out = ("--out", tmp_path) if arguments[0] == "release" else ()
    site = () if "--site" in arguments else ("--site", UPSTREAM)
    done = program(*arguments, *site, *out)
    assert done.returncode not in (0, 1, 10, 11)
    assert said in done.stderr
    assert "next" in done.stderr
    assert "Traceback" not in done.stderr
