"""Verdicts, held against what git says of the same texts."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from overlay.patches import Series, parse
from review import merging
from review.merging import Merged
from support import mini, series
from support.checkouts import git
from support.cherry_pick import assert_same_as_git
from support.series import BASE, CHANGES, EDITS, PATH, RUNNER, Change, replaced


def merged(release: str, patches: Series | None = None, base: str = RUNNER) -> Merged:
    return merging.merge(
        patches or series.series(),
        series.upstream({**BASE, PATH: base}),
        series.upstream({**BASE, PATH: release}),
    )


def sides(conflict: str) -> list[list[str]]:
    """The lines of a conflict in the release, in the pinned release, and with the patch."""
    parts: list[list[str]] = []
    for line in conflict.splitlines()[:-1]:
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
    assert result.conflicts == ({PATH} if "conflicts" in change.verdicts else set())
    base, there = {PATH: RUNNER.encode()}, {PATH: release.encode()}
    assert_same_as_git(tmp_path / "tree", series.series(), base, there, result)


def test_a_conflict_shows_its_three_sides_and_is_left_out() -> None:
    release = CHANGES["a change inside a seam"].edit(RUNNER)
    result = merged(release)
    first = result.patches[0]
    ((path, conflict),) = first.conflicts
    assert (path, sides(conflict)) == (
        PATH,
        [["        self.wait(1)"], ["        self.wait()"], ["        readiness.note(self)"]],
    )
    assert first.functions == ((PATH, "Runner.sample"),)
    assert "Runner.sample" in first.because
    assert result.texts[PATH].decode() == replaced(release, EDITS[1])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_that_look_like_gits_marks_are_none(end: str) -> None:
    marks = "<<<<<<< release\n||||||| base\n=======\n>>>>>>> overlay\n"
    text = f'MARKS = """\n{marks}"""\n\n\n{RUNNER}'.replace("\n", end)
    release = replaced(text, (f"        self.wait(){end}", f"        self.wait(1){end}"))
    edit = (f"        self.wait(){end}", f"        readiness.note(self){end}")
    ((_, conflict),) = merged(release, series.series((edit,), text), text).patches[0].conflicts
    assert sides(conflict)[0] == ["        self.wait(1)"]


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
    patch = parse("0001-any.patch", mini.HEADER.encode() + b"\n" + data)
    result = merged(release, Series([patch]))
    (judged,) = result.patches
    folder = tmp_path_factory.mktemp("merge")
    for name, text in (("ours", release), ("base", RUNNER), ("theirs", changed)):
        (folder / name).write_text(text)
    done = git(folder, "merge-file", "-p", "ours", "base", "theirs", code=None)
    assert (judged.verdict == "conflicts") == bool(done.returncode)
    if not done.returncode:
        assert result.texts[PATH].decode() == done.stdout
        assert (judged.verdict == "obsolete") == (done.stdout == release)
    if judged.verdict == "applies":
        assert patch.files[0].apply(release.encode(), "").decode() == done.stdout
