"""A run is as its manifest decided, or says where it is not."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.harness import manifest
from support import runs
from support.runs import pairs


def a_run() -> dict[str, Any]:
    return runs.run(*pairs(2.0, 2.0), *pairs(2.0, 2.0, case="presence, 4"))


def leave_out(run: Any) -> None:
    run["slices"] = [one for one in run["slices"] if one["case"] == "plain, 4"]


def add(run: Any) -> None:
    run["slices"] += pairs(9.0, case="another")


def lose_a_round(run: Any) -> None:
    run["slices"] = [one for one in run["slices"] if (one["case"], one["round"]) != ("plain, 4", 2)]


def exchange_an_installation(run: Any) -> None:
    run["digests"]["overlaid"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (leave_out, "tiny, presence, 4, overlaid/stock was left out"),
        (add, "tiny, another, overlaid/stock was not decided"),
        (lose_a_round, "tiny, plain, 4, overlaid/stock has 1 rounds, not 2"),
        (exchange_an_installation, "the digest of overlaid is not the one that was decided"),
    ],
)
def test_a_difference_is_named(change: Callable[[Any], None], sentence: str) -> None:
    run = a_run()
    assert list(manifest.differences(run)) == []
    change(run)
    assert list(manifest.differences(run)) == [sentence]


@pytest.mark.parametrize(
    ("limit", "seconds", "allowed"), [(100.0, 60.0, True), (130.0, 60.0, False), (None, 60, False)]
)
def test_rounds_may_be_fewer_if_another_would_have_ended_after_the_limit(
    limit: float | None, seconds: float, allowed: bool
) -> None:
    run = runs.run(*pairs(2.0), seconds=seconds)
    run["manifest"] |= {"limit": limit, "rounds": 5}
    assert (list(manifest.differences(run)) == []) == allowed


def test_each_group_has_the_rounds_of_all_joined_manifests() -> None:
    one, other = runs.run(*pairs(2.0)), runs.run(*pairs(2.0, 2.0), *pairs(1.0, 1.0, case="more"))
    other["manifest"]["changed"] = ["a.py"]
    decided = manifest.joined([one["manifest"], other["manifest"]])
    assert [manifest.rounds_of(decided, group) for group in decided["groups"]] == [3, 2]
    assert decided["changed"] == ["a.py"]
    assert manifest.joined([one["manifest"], {}]) == {}


def test_the_commit_and_the_files_that_differ_from_it_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(manifest, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    groups = [("tiny", "plain, 4", ("overlaid", "stock"))]
    decided = manifest.decide("command", 5, {"stock": "1"}, groups)
    assert (decided["commit"], decided["groups"]) == (
        None,
        [["tiny", "plain, 4", ["overlaid", "stock"]]],
    )
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-q", "-m", "A file")
    (tmp_path / "other").touch()
    decided = manifest.decide("command", 5, {"stock": "1"}, groups)
    assert (decided["commit"], decided["changed"]) == (git("rev-parse", "HEAD"), [])
    (tmp_path / "file").write_text("2")
    changed = manifest.decide("command", 5, {"stock": "1"}, groups)
    assert changed["changed"] == ["file"]
    (tmp_path / "other").unlink()
    text = f"files differed from {decided['commit'][:12]}: file"
    assert manifest.uncommitted({"manifest": changed}) == text
    assert manifest.uncommitted({"manifest": decided}) == ""
    assert manifest.digest(changed) != manifest.digest(decided)
