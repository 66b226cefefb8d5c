"""A series put on a release by git alone, to hold verdicts against."""

import os
import subprocess
from pathlib import Path

from overlay.patches import Series
from review.merging import Merged


def git(tree: Path, *arguments: str, code: int | None = 0) -> "subprocess.CompletedProcess[str]":
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *arguments]
    done = subprocess.run(
        command,
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "GIT_EDITOR": "true"},
    )
    assert code is None or done.returncode == code, done.stderr
    return done


def picked(
    tree: Path, patches: Series, base: dict[str, bytes], release: dict[str, bytes], skip: set[str]
) -> tuple[list[bool], dict[str, bytes]]:
    """What ``git cherry-pick`` says: which patches conflict, and the files that it ends with.

    Args:
        tree: an empty directory.
        patches: the series.
        base: the files that it is for.
        release: the files that it is put on.
        skip: patches that are not needed, and left out.
    """

    def commit(texts: dict[str, bytes], message: str) -> str:
        for path, data in texts.items():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_bytes(data)
        git(tree, "add", "--all")
        git(tree, "commit", "--quiet", "--allow-empty", "-m", message)
        return git(tree, "rev-parse", "HEAD").stdout.strip()

    tree.mkdir(exist_ok=True)
    git(tree, "init", "--quiet")
    first = commit(base, "base")
    commits = []
    texts = dict(base)
    for patch in patches.patches:
        texts |= {f.path: f.apply(texts[f.path], patch.name) for f in patch.files}
        commits.append((patch.name, commit(texts, patch.name)))
    git(tree, "checkout", "--quiet", "--detach", first)
    commit(release, "release")
    conflicts = []
    for name, each in commits:
        options = ["--allow-empty", "--keep-redundant-commits", "-Xdiff-algorithm=myers"]
        done = git(tree, "cherry-pick", *options, each, code=None)
        conflicts.append(done.returncode != 0)
        if done.returncode:
            git(tree, "cherry-pick", "--abort")
            if name not in skip:
                git(tree, "cherry-pick", *options, "-Xours", each)
    return conflicts, {path: (tree / path).read_bytes() for path in base}


def held_against_git(
    tree: Path, patches: Series, base: dict[str, bytes], release: dict[str, bytes], found: Merged
) -> None:
    """Assert that conflicts and texts are git's own."""
    verdicts = {each.patch.name: each for each in found.patches}
    skip = {name for name, each in verdicts.items() if each.verdict == "obsolete"}
    conflicts, texts = picked(tree, patches, base, release, skip)
    for (name, each), conflict in zip(verdicts.items(), conflicts, strict=True):
        assert conflict == (
            each.verdict == "conflicts"
            or any(hunk.verdict == "gone" for file in each.files for hunk in file.hunks)
        ), name
    assert found.texts == texts
