"""edit and refresh: the series as commits, and the commits as a series."""

import os
import subprocess
from pathlib import Path

import pytest
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.patches import header_fields
from overlay.pin import PACKAGE, sha256
from overlay.source import Overlay
from series import errata, upstream
from series import tree as edit_tree
from series.check import FIELDS, complaints, load_unproven
from series.edit import edit
from series.refresh import refresh
from support import series, sites
from support.checkouts import checkout, git
from support.series import BASE, PATH
from support.sites import OVERLAY, REPO, run_package, snapshot

MESSAGE = "Description: Another seam\n why\n" + "".join(
    f"{name}: text\n" for name in FIELDS if name != "Description"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a series of three patches."""
    return series.checkout(tmp_path / "checkout").root


@pytest.fixture
def tree(root: Path) -> Path:
    """The series of ``root``, laid out."""
    lay_out(root)
    return root / edit_tree.EDIT


def lay_out(root: Path) -> None:
    edit(load_unproven(root), series.upstream(BASE), dry_run=False)


def in_order(root: Path) -> bool:
    return not list(complaints(root, lambda path: BASE[path].encode()))


def add_line(tree: Path, line: str = "MORE = 9") -> None:
    with (tree / PATH).open("a") as file:
        file.write(f"{line}\n")


def commit(tree: Path, message: str = MESSAGE) -> None:
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--file=-", input=message)


def refused(root: Path, code: Exit, *parts: str) -> None:
    """Refresh is refused, and writes nothing."""
    before = snapshot(root / "patches"), (root / "VERSION_PIN").read_bytes()
    with pytest.raises(OverlayError) as caught:
        refresh(root, dry_run=False)
    assert caught.value.code is code
    for part in parts:
        assert part in str(caught.value)
    assert (snapshot(root / "patches"), (root / "VERSION_PIN").read_bytes()) == before


def test_the_real_series_comes_back_as_it_was(tmp_path: Path) -> None:
    """By the command lines that the Makefile uses."""
    root = checkout(tmp_path / "checkout")
    site = sites.small(tmp_path / "site")
    laid_out = run_package("series", "edit", "--site", site, root=root)
    assert (laid_out.returncode, laid_out.stderr) == (Exit.DONE, "")
    tree = root / edit_tree.EDIT
    for path in OVERLAY.targets:
        assert sha256((tree / path).read_bytes()) == OVERLAY.pin.result[path]
    subjects = git(tree, "log", "--format=%s", "pristine..HEAD").stdout.splitlines()
    descriptions = [header_fields(p.header)["Description"] for p in OVERLAY.series.patches]
    assert subjects[::-1] == [text.partition("\n")[0] for text in descriptions]
    refreshed = run_package("series", "refresh", root=root)
    assert "nothing to do" in refreshed.stdout, refreshed.stderr


def test_an_edit_becomes_a_patch_and_its_removal_takes_it_back(root: Path, tree: Path) -> None:
    before = snapshot(root / "patches"), (root / "VERSION_PIN").read_bytes()
    add_line(tree)
    refused(root, Exit.USAGE, "uncommitted")
    with pytest.raises(OverlayError, match="not in patches/"):
        lay_out(root)
    commit(tree)
    with pytest.raises(OverlayError, match="not in patches/"):
        lay_out(root)
    dry = refresh(root, dry_run=True)
    assert (snapshot(root / "patches"), (root / "VERSION_PIN").read_bytes()) == before
    assert refresh(root, dry_run=False) == dry
    patch = (root / "patches" / "0004-another-seam.patch").read_text()
    assert patch.startswith("Description: Another seam\n why\n")
    assert patch.endswith("+MORE = 9\n")
    assert in_order(root)
    assert Overlay.load(root).overlaid_bytes(PATH, BASE[PATH].encode()).endswith(b"\nMORE = 9\n")
    lay_out(root)
    git(tree, "reset", "--quiet", "--hard", "HEAD~1")
    with pytest.raises(OverlayError, match="not in patches/"):
        lay_out(root)
    assert "patches/0004-another-seam.patch (removed)" in refresh(root, dry_run=False)
    assert (snapshot(root / "patches"), (root / "VERSION_PIN").read_bytes()) == before


@pytest.mark.parametrize(
    ("message", "new_file", "parts"),
    [
        ("no header\n", False, ["Drop-When"]),
        (f"{MESSAGE}--- x\n", False, ["begins with '--- '"]),
        (MESSAGE, True, ["vllm/new.py", f"vendor_overlay/{PACKAGE}"]),
    ],
)
def test_a_commit_that_is_no_patch_is_refused(
    root: Path, tree: Path, message: str, new_file: bool, parts: list[str]
) -> None:
    if new_file:
        (tree / "vllm" / "new.py").write_text("x\n")
    else:
        add_line(tree)
    commit(tree, message)
    refused(root, Exit.USAGE, *parts)


@pytest.mark.parametrize(
    ("message", "header"),
    [
        (f"Another seam\n\n{MESSAGE}", MESSAGE),
        (MESSAGE, MESSAGE),
        (f"{MESSAGE}\nMore, after a gap.\n", f"{MESSAGE}\nMore, after a gap.\n"),
    ],
)
def test_a_subject_is_no_part_of_the_header(message: str, header: str) -> None:
    assert edit_tree.header_of(message) == header.rstrip("\n")
    assert edit_tree.header_of(edit_tree.message_of(header)) == header.rstrip("\n")


@pytest.mark.parametrize("another_patch", [True, False])
def test_refresh_does_not_overwrite_changes_to_patches_since_edit(
    root: Path, tree: Path, another_patch: bool
) -> None:
    if another_patch:
        (root / "patches" / "0009-draft.patch").write_text("draft")
    else:
        patch = next((root / "patches").glob("0003-*"))
        patch.write_bytes(patch.read_bytes().replace(b"How: ", b"How:  "))
    refused(root, Exit.BUSY, "make edit")


def test_refresh_makes_the_page_of_facts_that_change_at_any_time(root: Path, tree: Path) -> None:
    facts = root / "patches" / errata.NAME
    facts.write_bytes((REPO / "patches" / errata.NAME).read_bytes())
    assert not in_order(root)
    assert refresh(root, dry_run=False) == [errata.PAGE]
    assert (root / errata.PAGE).read_bytes() == (REPO / errata.PAGE).read_bytes()
    assert in_order(root)
    facts.write_text(facts.read_text().replace('who = "race"', 'who = "operator"'))
    assert refresh(root, dry_run=False) == [errata.PAGE]
    assert refresh(root, dry_run=False) == []


def test_refresh_waits_for_the_end_of_a_rebase(root: Path, tree: Path) -> None:
    git(tree, "checkout", "--quiet", "--detach", "pristine")
    refused(root, Exit.BUSY, "rebase")
    with pytest.raises(OverlayError, match="not in patches/"):
        lay_out(root)
    git(tree, "checkout", "--quiet", "series")
    assert refresh(root, dry_run=False) == []


def test_refresh_does_not_follow_an_edit_that_was_cut_off(
    root: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = 0
    commit_for_real = edit_tree.commit

    def cut(folder: Path, message: str) -> None:
        nonlocal commits
        commits += 1
        if commits > 2:
            raise KeyboardInterrupt
        commit_for_real(folder, message)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(edit_tree, "commit", cut)
        lay_out(root)
    git(tree, "reset", "--quiet", "--hard")
    refused(root, Exit.BUSY, "cut off")
    lay_out(root)
    assert refresh(root, dry_run=False) == []


def test_edit_refuses_a_draft_that_refresh_would_remove(root: Path) -> None:
    (root / "patches" / "0009-draft.patch").write_text("draft")
    with pytest.raises(OverlayError, match=r"0009-draft\.patch") as caught:
        lay_out(root)
    assert caught.value.code is Exit.BUSY
    assert not (root / "build").exists()


def test_a_patch_changed_by_hand_needs_the_edit_tree(root: Path) -> None:
    patch = next((root / "patches").glob("0003-*"))
    patch.write_bytes(patch.read_bytes().replace(b"How: ", b"How: Well, "))
    refused(root, Exit.USAGE, "make edit")
    lay_out(root)
    refresh(root, dry_run=False)
    assert in_order(root)


def test_refresh_follows_our_own_modules_without_an_edit_tree(root: Path) -> None:
    package = root / "vendor_overlay" / PACKAGE
    (package / ".notes.py.swp").write_text("an editor's")
    (package / "notes.py~").write_text("an editor's")
    assert refresh(root, dry_run=False) == []
    (package / "version.py").write_text('__version__ = "9.9.9"\n')
    assert not in_order(root)
    assert refresh(root, dry_run=False) == ["VERSION_PIN"]
    assert in_order(root)
    assert Overlay.load(root).pin.overlay == "9.9.9"
    (package / "a b.py").write_text("")
    refused(root, Exit.FAULT, "a b.py")


def test_upstream_s_files_are_proven(tmp_path: Path) -> None:
    site = sites.small(tmp_path / "site")
    (site / OVERLAY.targets[0]).write_text("mine\n")
    with pytest.raises(OverlayError) as caught:
        upstream.from_installation(locate(site=str(site)), OVERLAY)
    assert caught.value.code is Exit.FOREIGN
    wheel = tmp_path / "vllm-0.22.0-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(OverlayError, match=sha256(b"PK")) as caught:
        upstream.from_wheel(wheel, OVERLAY)
    assert caught.value.code is Exit.RELEASE


FILLED = {"GIT_EDITOR": r"sed -i 's/^\([A-Za-z-]*\):$/\1: text/'"}


def commit_in_editor(tree: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Commit everything as an author does, whose editor is a program."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    return subprocess.run(
        ["git", *identity, "commit", "--all"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def test_a_new_patch_begins_with_its_header(root: Path) -> None:
    upstream = series.upstream(BASE)
    edit(load_unproven(root), upstream, dry_run=False, patch_name="keep-rows-apart")
    tree = root / edit_tree.EDIT
    assert refresh(root, dry_run=False) == []
    add_line(tree)
    untouched = commit_in_editor(tree, GIT_EDITOR="true")
    assert "did not edit the message" in untouched.stderr
    filled = commit_in_editor(tree, **FILLED)
    assert filled.returncode == 0, filled.stderr
    refresh(root, dry_run=False)
    patch = load_unproven(root).series.patches[-1]
    assert patch.name == "0004-keep-rows-apart.patch"
    assert list(header_fields(patch.header)) == list(FIELDS)
    assert in_order(root)
    # The next layout begins no patch.
    lay_out(root)
    add_line(tree, "AGAIN = 1")
    assert commit_in_editor(tree, GIT_EDITOR="true").returncode != 0
    assert "Keep rows apart" not in (tree / ".git" / "COMMIT_EDITMSG").read_text()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("edit-2", "patches/0002-edit-2.patch"),
        ("", "not the name of a patch"),
        ("../rows", "not the name of a patch"),
    ],
)
def test_a_name_that_a_new_patch_cannot_have_is_refused(root: Path, name: str, part: str) -> None:
    with pytest.raises(OverlayError, match=part) as caught:
        edit(load_unproven(root), series.upstream(BASE), dry_run=False, patch_name=name)
    assert caught.value.code is Exit.USAGE
    assert not (root / "build").exists()
