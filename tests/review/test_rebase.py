"""The series rebased on another release, in the author's tree."""

from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from overlay.source import Overlay
from series import check
from series.check import load_unproven
from series.edit import edit
from series.edit import rebase as rebase_series
from series.refresh import refresh
from support import checkouts, series
from support.series import BASE, CHANGES, EDITS, PATH, RUNNER
from support.sites import snapshot

VERSION = "0.23.0"
ARCHIVES = {"vllm-0.23.0-py3-none-any.whl": "a" * 64}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    series.checkout(tmp_path / "checkout")
    return tmp_path / "checkout"


def rebase(root: Path, text: str) -> list[str]:
    release = series.upstream({**BASE, PATH: text})
    overlay = load_unproven(root)
    return rebase_series(overlay, series.upstream(BASE), release, VERSION, ARCHIVES)


def git(root: Path, *arguments: str, code: int = 0) -> str:
    return checkouts.git(root / "build" / "edit", *arguments, code=code).stdout


def refreshed(root: Path, text: str) -> Overlay:
    """The overlay after `make refresh`, which has to fit the release."""
    refresh(root, dry_run=False)
    overlay = Overlay.load(root)
    assert overlay.pin.release == VERSION
    assert overlay.pin.archives == ARCHIVES
    texts = {**BASE, PATH: text}
    assert list(check.complaints(root, lambda path: texts[path].encode())) == []
    return overlay


def test_a_patch_that_the_release_holds_is_dropped(root: Path) -> None:
    text = CHANGES["our own change"].edit(RUNNER)
    assert rebase(root, text) == []
    descriptions = [p.header.splitlines()[0] for p in refreshed(root, text).series.patches]
    assert descriptions == ["Description: Edit 2", "Description: Edit 3"]


def test_git_stops_at_a_conflict_until_the_author_resolves_it(root: Path) -> None:
    text = CHANGES["a change inside a seam"].edit(RUNNER)
    headers = [patch.header for patch in Overlay.load(root).series.patches]
    before = snapshot(root / "patches")
    assert rebase(root, text) == [PATH]
    file = root / "build" / "edit" / PATH
    stopped = file.read_text()
    for line in ("        self.wait()", "        self.wait(1)", "        readiness.note(self)"):
        assert f"{line}\n" in stopped
    with pytest.raises(OverlayError, match="a rebase is under way") as refused:
        refresh(root, dry_run=False)
    assert refused.value.code is Exit.BUSY
    assert snapshot(root / "patches") == before
    # An author's resolution: the patch's call instead of the new one.
    wanted = series.replaced(text, ("        self.wait(1)\n", EDITS[0][1]))
    file.write_text(wanted)
    git(root, "add", PATH)
    git(root, "rebase", "--continue")
    overlay = refreshed(root, text)
    assert [patch.header for patch in overlay.series.patches] == headers
    assert overlay.series.apply(PATH, text.encode()).decode() == series.replaced(wanted, *EDITS[1:])
    assert len(overlay.series.patches) == len(EDITS)


def test_each_conflict_shows_the_old_text(root: Path) -> None:
    """So do those at which git stops after the first."""
    rebase(root, CHANGES["a change inside a seam"].edit(RUNNER))
    file = root / "build" / "edit" / PATH
    assert "\n||||||| " in file.read_text()
    git(root, "checkout", "--ours", PATH)
    git(root, "add", PATH)
    git(root, "-c", "core.editor=true", "rebase", "--skip", code=1)
    assert "readiness.note(self, chosen)" in file.read_text()
    assert "\n||||||| " in file.read_text()


def test_gits_marks_are_not_written_out(root: Path) -> None:
    rebase(root, CHANGES["a change inside a seam"].edit(RUNNER))
    before = snapshot(root / "patches")
    git(root, "add", PATH)
    git(root, "rebase", "--continue", code=1)
    git(root, "add", PATH)
    git(root, "rebase", "--continue")
    with pytest.raises(OverlayError, match="git's mark of a conflict: <<<<<<<"):
        refresh(root, dry_run=False)
    assert snapshot(root / "patches") == before


def test_a_user_s_attributes_do_not_change_merges(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").mkdir()
    (tmp_path / "git" / "attributes").write_text("*.py merge=union\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert rebase(root, CHANGES["a change inside a seam"].edit(RUNNER)) == [PATH]


def test_a_rebase_on_the_pinned_release_is_refused(root: Path) -> None:
    before = snapshot(root)
    release = series.upstream(BASE)
    with pytest.raises(OverlayError, match="is the release that the overlay is for"):
        rebase_series(load_unproven(root), release, release, "0.22.0", ARCHIVES)
    assert snapshot(root) == before


def test_an_aborted_rebase_is_not_written_out(root: Path) -> None:
    rebase(root, CHANGES["a change inside a seam"].edit(RUNNER))
    git(root, "rebase", "--abort")
    before = snapshot(root)
    with pytest.raises(OverlayError, match="a rebase was given up"):
        refresh(root, dry_run=False)
    assert snapshot(root) == before


def test_a_rebased_tree_holds_work_until_it_is_written_out(root: Path) -> None:
    text = CHANGES["a line above"].edit(RUNNER)
    rebase(root, text)
    with pytest.raises(OverlayError, match="holds changes that are not in patches/"):
        edit(load_unproven(root), series.upstream(BASE), dry_run=False)
    overlay = refreshed(root, text)
    # And from then on the tree is one for that release, as `make edit` makes it.
    edit(overlay, series.upstream({**BASE, PATH: text}), dry_run=False)
    assert refresh(root, dry_run=False) == []
    assert Overlay.load(root).pin == overlay.pin
