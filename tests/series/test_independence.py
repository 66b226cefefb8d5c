"""Each patch can be dropped alone, as when a release has it."""

from pathlib import Path

import pytest
from overlay import merge
from overlay.errors import OverlayError
from series import git, tree
from series.upstream import Upstream
from support.sites import OVERLAY, UPSTREAM

pytestmark = pytest.mark.slow

PATCHES = OVERLAY.series.patches


def read(path: str) -> bytes:
    """Upstream's bytes of a file."""
    return (UPSTREAM / path).read_bytes()


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of the patched files, with a commit for each patch."""
    folder = tmp_path_factory.mktemp("series")
    paths = tuple(sorted(OVERLAY.series.paths()))
    upstream = Upstream(paths, read)
    commits, texts = [], {path: upstream.read(path) for path in paths}
    for patch in PATCHES:
        changed = {f.path: f.apply(texts[f.path], patch.name) for f in patch.files}
        texts |= changed
        commits.append((patch.header, changed))
    tree.lay_out(folder, "pristine", upstream, commits)
    return folder


@pytest.mark.parametrize("number", range(len(PATCHES)), ids=lambda n: PATCHES[n].name)
def test_the_others_apply_without_a_patch(laid_out: Path, number: int) -> None:
    """By git, as an author's rebase would drop it; and what is left is Python.

    Patches of other files are not picked again: nothing below them changes.
    """
    commits = git.text(laid_out, "rev-list", "--reverse", f"{tree.PRISTINE}..series").split()
    assert len(commits) == len(PATCHES)
    paths = [file.path for file in PATCHES[number].files]
    later = git.text(laid_out, "rev-list", "--reverse", f"{commits[number]}..series", "--", *paths)
    git.text(laid_out, "checkout", "--quiet", "--detach", f"{commits[number]}^")
    try:
        for commit in later.split():
            git.text(laid_out, *tree.IDENTITY, "cherry-pick", "--allow-empty", commit)
    except OverlayError:
        git.text(laid_out, "cherry-pick", "--abort")  # the tree serves the other patches
        raise
    names = {patch.name for patch in PATCHES if patch is not PATCHES[number]}
    part = merge.part(OVERLAY.series, names, paths, read)
    for path in paths:
        data = (laid_out / path).read_bytes()
        compile(data, path, "exec")
        # Without offsets or context, and with the same result as git's merge.
        assert part.apply(path, read(path)) == data
