"""Verdicts, held against what git says of the same texts."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from overlay.patches import Series, parse
from review import merging
from review.merging import JudgedHunk, Merged
from support import mini, series
from support.checkouts import git
from support.cherry_pick import assert_same_as_git
from support.series import BASE, CHANGES, PATH, RUNNER, Change


def merged(release: str, patches: Series | None = None, base: str = RUNNER) -> Merged:
    return merging.merge(
        patches or series.series(),
        series.upstream({**BASE, PATH: base}),
        series.upstream({**BASE, PATH: release}),
    )


def sides(hunk: JudgedHunk) -> list[list[str]]:
    """The lines of a conflict in the release, in the pinned release, and with the hunk."""
    parts: list[list[str]] = []
    for line in hunk.conflict[:-1]:
        if line.startswith(("<" * 31, "|" * 31, "=" * 31)):
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_one_change_of_upstreams(change: Change, tmp_path: Path) -> None:
    release = change.edit(RUNNER)
    result = merged(release)
    assert tuple(judged.verdict for judged in result.patches) == change.verdicts
    hunks = [judged.hunks for judged in result.patches]
    assert tuple(hunk.verdict for (hunk,) in hunks) == change.hunks
    base, there = {PATH: RUNNER.encode()}, {PATH: release.encode()}
    assert_same_as_git(tmp_path / "tree", series.series(), base, there, result)


def test_a_hunk_that_moved_says_where_to() -> None:
    result = merged(CHANGES["a line above"].edit(RUNNER))
    (first,) = result.patches[0].hunks
    line = RUNNER.splitlines().index("        self.wait()") + 1
    assert (first.was, first.now, first.function) == (line, line + 1, "Runner.sample")


def test_a_conflict_shows_its_three_sides_and_where_the_lines_are_now() -> None:
    result = merged(CHANGES["a moved block"].edit(RUNNER))
    (hunk,) = result.patches[1].hunks
    there = CHANGES["a moved block"].edit(RUNNER).splitlines()
    assert hunk.now is not None
    assert there[hunk.now - 1] == "    def finish(self):"
    assert sides(hunk)[2].count("        readiness.done(self)") == 1
    assert "        readiness.done(self)" not in sides(hunk)[1]
    assert not any(line.strip() for line in sides(hunk)[0])
    inside = merged(CHANGES["a change inside a seam"].edit(RUNNER)).patches[0].hunks[0]
    assert sides(inside) == [
        ["        self.wait(1)"],
        ["        self.wait()"],
        ["        readiness.note(self)"],
    ]
    assert inside.now is None


def test_conflicting_hunks_are_marked_and_left_out() -> None:
    release = CHANGES["a change inside a seam"].edit(RUNNER)
    result = merged(release)
    assert result.conflicts == {PATH}
    assert set(result.marked) == {("0001-edit-1.patch", PATH), ("0003-edit-3.patch", PATH)}
    marked = result.marked["0001-edit-1.patch", PATH].decode()
    assert "        self.wait(1)\n" in marked
    assert "        readiness.note(self)\n" in marked
    assert result.texts[PATH].decode() == series.replaced(release, series.EDITS[1])


def test_lines_that_look_like_gits_marks_are_none() -> None:
    marks = "<<<<<<< release\n||||||| base\n=======\n>>>>>>> overlay\n"
    text = f'MARKS = """\n{marks}"""\n\n\n{RUNNER}'
    release = series.replaced(text, ("        self.wait()\n", "        self.wait(1)\n"))
    result = merged(release, series.series(text=text), text)
    (hunk,) = result.patches[0].hunks
    assert sides(hunk)[0] == ["        self.wait(1)"]


def test_lines_that_end_as_on_windows_conflict_as_others_do() -> None:
    text, release = (
        each.replace("\n", "\r\n")
        for each in (RUNNER, CHANGES["a change inside a seam"].edit(RUNNER))
    )
    edit = ("        self.wait()\r\n", "        readiness.note(self)\r\n")
    result = merged(release, series.series((edit,), text), text)
    assert result.patches[0].verdict == "conflicts"


LINES = RUNNER.splitlines(keepends=True)
SPANS = st.tuples(st.integers(0, len(LINES)), st.integers(0, 3), st.integers(0, 3))


def edited(spans: list[tuple[int, int, int]], word: str) -> str:
    """The module with spans of lines replaced, from its end to its beginning."""
    lines = list(LINES)
    for at, out, put in sorted(set(spans), reverse=True):
        lines[at : at + out] = [f"# {word} {at} {n}\n" for n in range(put)]
    return "".join(lines)


@given(ours=st.lists(SPANS, min_size=1, max_size=4), theirs=st.lists(SPANS, max_size=4))
def test_any_changes_merge_as_git_merges_them(
    ours: list[tuple[int, int, int]],
    theirs: list[tuple[int, int, int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    changed, release = edited(ours, "ours"), edited(theirs, "theirs")
    assume(changed != RUNNER)
    data = mini.unified(PATH, RUNNER.encode(), changed.encode())
    patches = Series([parse("0001-any.patch", mini.HEADER.encode() + b"\n" + data)])
    result = merged(release, patches)
    (judged,) = result.patches
    out, conflicts = git_merge(tmp_path_factory.mktemp("merge"), release, RUNNER, changed)
    assert (judged.verdict == "conflicts") == bool(conflicts)
    if not conflicts:
        assert result.texts[PATH].decode() == out
    for hunk, own in zip(judged.hunks, patches.patches[0].files[0].hunks, strict=True):
        if hunk.verdict in ("applies", "moved"):
            assert hunk.now is not None
            # Its lines are where it says, in the release with the hunk alone.
            at = hunk.now - 1
            there = release.splitlines()
            removed = [line.decode().rstrip("\n") for line in own.old]
            assert there[at : at + len(removed)] == removed
            assert (hunk.verdict == "applies") == (hunk.now == hunk.was)


def git_merge(folder: Path, ours: str, base: str, theirs: str) -> tuple[str, int]:
    """What the reference says."""
    for name, text in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_text(text)
    done = git(folder, "merge-file", "-p", "ours", "base", "theirs", code=None)
    return done.stdout, done.returncode


def test_the_place_of_a_conflict_is_that_in_the_release_without_the_earlier_patches() -> None:
    edits = (
        ("LIMIT = 8\n", "LIMIT = 8\nours = 1\nours = 2\n"),
        ("        self.rows = []\n", ""),
        ("        self.wait()\n", "        readiness.note(self)\n"),
    )
    release = "# One more line.\n" + CHANGES["a change inside a seam"].edit(RUNNER)
    (hunk,) = merged(release, series.series(edits)).patches[2].hunks
    assert hunk.at is not None
    assert release.split("\n")[hunk.at - 1] == "        self.wait(1)"


def test_a_conflict_of_lines_that_are_only_put_in_has_its_place() -> None:
    ours = "        chosen = max(logits)\n"
    patches = series.series(((ours, f"{ours}        readiness.note(self)\n"),))
    release = RUNNER.replace(ours, f"{ours}        rest()\n")
    (hunk,) = merged(release, patches).patches[0].hunks
    assert sides(hunk)[:2] == [["        rest()"], []]
    assert hunk.at is not None
    assert release.split("\n")[hunk.at - 1] == "        rest()"
