"""A series merged into a release by ``git cherry-pick`` alone, to check verdicts against."""

from pathlib import Path

from overlay.patches import Series
from review.merging import Merged

from support.checkouts import git


def cherry_picked(
    tree: Path, patches: Series, base: dict[str, bytes], release: dict[str, bytes]
) -> tuple[list[bool], dict[str, bytes]]:
    """Cherry-pick each patch onto a release.

    Args:
        tree: an empty directory.
        patches: the series.
        base: the files that it is for.
        release: the files that it is put on.

    Returns:
        Whether each patch conflicts, and the files at the end.
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
        commits.append(commit(texts, patch.name))
    git(tree, "checkout", "--quiet", "--detach", first)
    commit(release, "release")
    conflicts = []
    for picked in commits:
        options = ["--allow-empty", "--keep-redundant-commits", "-Xdiff-algorithm=myers"]
        done = git(tree, "cherry-pick", *options, picked, code=None)
        conflicts.append(done.returncode != 0)
        if done.returncode:
            git(tree, "cherry-pick", "--abort")
            git(tree, "cherry-pick", *options, "-Xours", picked)
    return conflicts, {path: (tree / path).read_bytes() for path in base}


def assert_same_as_git(
    tree: Path, patches: Series, base: dict[str, bytes], release: dict[str, bytes], merged: Merged
) -> None:
    """Assert that git has the same conflicts and ends with the same texts."""
    conflicts, texts = cherry_picked(tree, patches, base, release)
    for judged, conflict in zip(merged.patches, conflicts, strict=True):
        assert conflict == (judged.verdict == "conflicts"), judged.patch.name
    assert merged.texts == texts
