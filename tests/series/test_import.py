"""import-patch: a diff, which git made of real files, as a patch beside the series."""

import difflib
import json
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay.errors import Exit, OverlayError
from overlay.installation import locate
from overlay.patches import Series, header_fields
from series import diffs, places
from series.importing import Imported, import_patch
from series.upstream import Upstream, from_installation
from support.checkouts import git
from support.sites import OVERLAY, UPSTREAM, run_package, snapshot

#: A file that our patches change, and one that they do not.
OURS, THEIRS = "vllm/v1/core/sched/scheduler.py", "vllm/v1/core/sched/output.py"
LINE = b"# a line of this test\n"
KINDS = ("insert", "replace", "delete")


@cache
def upstream() -> Upstream:
    return from_installation(locate(site=str(UPSTREAM)), OVERLAY)


def text_of(path: str) -> bytes:
    """The file with the whole series applied."""
    return OVERLAY.series.apply(path, upstream().read(path))


def inserted(data: bytes, at: int, line: bytes = LINE) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join([*lines[:at], line, *lines[at:]])


def repository(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=before")
    return folder


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def git_diff(folder: Path, *options: str) -> bytes:
    git(folder, "add", "--all")
    command = ["git", "diff", "--cached", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout


def diff_of(
    folder: Path, before: Mapping[str, bytes], after: Mapping[str, bytes], *options: str
) -> bytes:
    repo = repository(folder, before)
    write(repo, after)
    return git_diff(repo, *options)


def imported(folder: Path, diff: bytes, dry_run: bool = False) -> Imported:
    folder.mkdir(exist_ok=True)
    file = folder / "some.diff"
    file.write_bytes(diff)
    return import_patch(OVERLAY, upstream(), file, folder / "extra", dry_run)


def result(folder: Path, path: str) -> bytes:
    """The file with our series and then everything in ``extra``, as the overlay applies it."""
    return Series.load(folder / "extra").apply(path, text_of(path))


def refused(folder: Path, diff: bytes, *parts: str) -> None:
    with pytest.raises(OverlayError) as caught:
        imported(folder, diff)
    assert caught.value.code is Exit.USAGE
    for part in parts:
        assert part in str(caught.value)
    assert not (folder / "extra").exists()


def test_a_diff_becomes_a_patch_and_what_was_left_out_is_said(tmp_path: Path) -> None:
    before = {OURS: text_of(OURS), THEIRS: text_of(THEIRS), "tests/test_x.py": b"1\n"}
    theirs = inserted(before[THEIRS], 30)
    foreign = inserted(before[OURS], 400, b"# not in the release\n")
    before[OURS] = foreign
    after = {
        OURS: inserted(inserted(foreign, 401), 20),
        THEIRS: theirs,
        "tests/test_x.py": b"2\n",
        "vllm/new.py": b"3\n",
        "csrc/x.cu": b"4\n",
    }
    file = tmp_path / "faster-x.diff"
    file.write_bytes(diff_of(tmp_path / "repo", before, after))
    arguments = ["--file", file, "--extra", tmp_path / "extra", "--site", UPSTREAM]
    made = run_package("series", "import-patch", *arguments)
    assert made.returncode == Exit.DONE, made.stderr
    for part in (
        f"{OURS}, line 399: its lines are not those of the pinned release",
        "tests/test_x.py: the pinned release has no such module",
        "vllm/new.py: adds a file",
        "csrc/x.cu: adds a file",
        "Origin",
    ):
        assert part in made.stdout
    assert made.stdout.count("left out") == 4
    (patch,) = Series.load(tmp_path / "extra").patches
    assert patch.name == "0001-faster-x.patch"
    assert header_fields(patch.header)["Origin"] == ""
    assert header_fields(patch.header)["Description"] == "faster-x"
    assert result(tmp_path, OURS) == inserted(text_of(OURS), 20)
    assert result(tmp_path, THEIRS) == theirs
    again = json.loads(run_package("series", "import-patch", *arguments, "--json").stdout or "{}")
    assert again["error"]["code"] == Exit.USAGE
    assert f"{THEIRS}, line 28: is there already" in again["error"]["reason"]


@settings(max_examples=8, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from(KINDS), st.booleans()),
        min_size=1,
        max_size=6,
        unique_by=lambda edit: edit[0],
    )
)  # fmt: skip
def test_exactly_the_hunks_that_apply_are_kept(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, str, bool]]
) -> None:
    """Spoilt hunks have a line in their context that the release does not have."""
    lines = text_of(OURS).splitlines(keepends=True)
    base, after, expected = list(lines), list(lines), list(lines)
    for place, kind, spoilt in sorted(edits, reverse=True):
        at = 20 * place
        new = {
            "insert": [LINE, lines[at]],
            "replace": [f"# line {place} of this test\n".encode()],
            "delete": [],
        }[kind]
        foreign = [f"# foreign {place}\n".encode()] if spoilt else []
        base[at - 1 : at] = [*foreign, lines[at - 1]]
        after[at - 1 : at + 1] = [*foreign, lines[at - 1], *new]
        if not spoilt:
            expected[at : at + 1] = new
    folder = tmp_path_factory.mktemp("import")
    diff = diff_of(folder / "repo", {OURS: b"".join(base)}, {OURS: b"".join(after)})
    spoilt_edits = sum(spoilt for *_, spoilt in edits)
    if spoilt_edits == len(edits):
        refused(folder, diff, "nothing of it can be taken over")
        return
    assert len(imported(folder, diff).left_out) == spoilt_edits
    assert result(folder, OURS) == b"".join(expected)


def test_the_commits_of_a_mail_box_become_one_patch(tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", {THEIRS: text_of(THEIRS)})
    data = text_of(THEIRS)
    for number, author in ((1, "Zoë Ünal <z@localhost>"), (2, "B <b@localhost>")):
        data = inserted(data, 20, f"# commit {number}\n".encode())
        write(repo, {THEIRS: data})
        message = f"Do part {number}\n\nReason {number}.\n--- not a diff\n\nMore."
        git(repo, "commit", "--quiet", "--all", f"--author={author}", f"--message={message}")
    mails = git(repo, "format-patch", "--stdout", "HEAD~2").stdout.encode()
    made = imported(tmp_path, mails)
    assert (made.left_out, made.file.name) == ([], "0001-do-part-1.patch")
    assert result(tmp_path, THEIRS) == data
    (patch,) = Series.load(tmp_path / "extra").patches
    fields = header_fields(patch.header)
    assert fields["Author"] == "Zoë Ünal <z@localhost>, B <b@localhost>"
    for part in ("Do part 1", "Do part 2", "Reason 1.", "Reason 2.", "More."):
        assert part in fields["Description"]
    assert THEIRS not in fields["Description"], "git's list of changed files"
    assert made.empty == ["How", "Bug", "Origin", "Forwarded", "Drop-When"]


@pytest.mark.parametrize("kind", ["crlf", "no prefix", "other prefix", "latin-1", "no end"])
def test_forms_of_diffs(tmp_path: Path, kind: str) -> None:
    repo = repository(tmp_path / "repo", {THEIRS: text_of(THEIRS)})
    after = (
        text_of(THEIRS) + b'X = "caf\xe9"\n' if kind == "latin-1" else inserted(text_of(THEIRS), 40)
    )
    if kind == "no end":
        after = after.rstrip(b"\n")
    write(repo, {THEIRS: after})
    prefix = {"no prefix": ["--no-prefix"], "other prefix": ["--src-prefix=i/", "--dst-prefix=w/"]}
    diff = git_diff(repo, *prefix.get(kind, []))
    if kind == "crlf":
        diff = diff.replace(b"\n", b"\r\n")
    made = imported(tmp_path, diff)
    assert made.left_out == []
    assert [THEIRS in text for text in made.warnings] == [True] * (kind == "latin-1")
    assert result(tmp_path, THEIRS) == after


def test_files_that_are_renamed_binary_or_gone_are_named(tmp_path: Path) -> None:
    other = "vllm/v1/core/sched/utils.py"
    files = {path: text_of(path) for path in (OURS, other, THEIRS)}
    repo = repository(tmp_path / "repo", {**files, "vllm/x.bin": b"\0a"})
    git(repo, "mv", OURS, "vllm/moved.py")
    git(repo, "rm", "--quiet", other)
    write(repo, {"vllm/x.bin": b"\0b", THEIRS: inserted(files[THEIRS], 3)})
    (repo / THEIRS).chmod(0o755)
    made = imported(tmp_path, git_diff(repo, "--find-renames"))
    assert sorted(made.left_out) == [
        "vllm/moved.py: renames or copies a file",
        f"{THEIRS}: the change of its permissions",
        f"{other}: deletes a file",
        "vllm/x.bin: changes a binary file",
    ]
    assert result(tmp_path, THEIRS) == inserted(files[THEIRS], 3)


@pytest.mark.parametrize(
    ("diff", "part"),
    [
        (b"", "holds no diff"),
        (b"hello\n", "holds no diff"),
        (b"--- a/vllm/x.py\n+++ b/vllm/x.py\n@@ -1,2 +1,2 @@\n a\n", "hunk at line 3"),
        (b"--- a/../x.py\n+++ b/../x.py\n@@ -1 +1 @@\n-a\n+b\n", "no such module"),
    ],
)
def test_what_cannot_be_imported_is_refused(tmp_path: Path, diff: bytes, part: str) -> None:
    refused(tmp_path, diff, part)


def test_patches_are_numbered_and_listed_in_order(tmp_path: Path) -> None:
    text = text_of(THEIRS)
    first, second = inserted(text, 5), inserted(inserted(text, 5), 6, b"# second\n")
    imported(tmp_path, diff_of(tmp_path / "one", {THEIRS: text}, {THEIRS: first}))
    series = tmp_path / "extra" / "series"
    series.write_text(f"# ours\n{series.read_text()}".rstrip("\n"))
    diff = diff_of(tmp_path / "two", {THEIRS: first}, {THEIRS: second})
    before = snapshot(tmp_path / "extra")
    assert imported(tmp_path, diff, dry_run=True).file.name == "0002-some.patch"
    assert snapshot(tmp_path / "extra") == before
    (tmp_path / "extra" / "0002-some.patch").write_text("mine")
    with pytest.raises(OverlayError, match="is not listed"):
        imported(tmp_path, diff)
    (tmp_path / "extra" / "0002-some.patch").unlink()
    imported(tmp_path, diff)
    assert series.read_text() == "# ours\n0001-some.patch\n0002-some.patch\n"
    assert result(tmp_path, THEIRS) == second


@pytest.mark.parametrize("inner", ["", "mine"])
def test_our_own_series_is_no_place_for_it(tmp_path: Path, inner: str) -> None:
    file = tmp_path / "some.diff"
    file.write_bytes(diff_of(tmp_path / "a", {THEIRS: text_of(THEIRS)}, {THEIRS: b"1\n"}))
    with pytest.raises(OverlayError, match="EXTRA=dir"):
        import_patch(OVERLAY, upstream(), file, OVERLAY.root / "patches" / inner, True)


def edited(data: bytes, edits: Mapping[int, str]) -> bytes:
    """The text with one line inserted before, put in place of, or taken out at each index."""
    lines = data.splitlines(keepends=True)
    for at, kind in edits.items():
        new = f"# edit {at}\n".encode()
        lines[at] = {"insert": new + lines[at], "replace": new, "delete": b""}[kind]
    return b"".join(lines)


def merged(folder: Path, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
    """The three-way merge of git; None where it conflicts."""
    for name, data in (("ours", ours), ("base", base), ("theirs", theirs)):
        (folder / name).write_bytes(data)
    command = ["git", "merge-file", "--stdout", "ours", "base", "theirs"]
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


@settings(max_examples=25, deadline=None)
@given(
    edits=st.dictionaries(st.integers(0, 440), st.sampled_from(KINDS), min_size=1, max_size=6),
    context=st.integers(0, 3),
    pinned=st.booleans(),
)
def test_line_numbers_hold_in_a_diff_of_a_file_that_is_known(
    tmp_path_factory: pytest.TempPathFactory, edits: dict[int, str], context: int, pinned: bool
) -> None:
    """Either upstream's file, or the one with our series: git's `index` line tells which."""
    folder = tmp_path_factory.mktemp("known")
    base = upstream().read(OURS) if pinned else text_of(OURS)
    after = edited(base, edits)
    expected = merged(folder, text_of(OURS), base, after)
    diff = diff_of(folder / "repo", {OURS: base}, {OURS: after}, f"-U{context}")
    try:
        left_out = imported(folder, diff).left_out
    except OverlayError as error:
        left_out = [str(error)]
    if not left_out:
        assert expected in (None, result(folder, OURS))
    elif expected is not None:
        assert pinned
        assert "a patch of the overlay, or one before it, has changed" in left_out[0]


@settings(max_examples=200, deadline=None)
@given(
    before=st.lists(st.sampled_from(["a", "b", "", "x"]), max_size=9),
    edits=st.dictionaries(st.integers(0, 8), st.sampled_from(KINDS), min_size=1, max_size=4),
    foreign=st.integers(0, 2),
    context=st.integers(0, 3),
    end=st.booleans(),
)
def test_no_hunk_is_placed_where_its_lines_are_not_alone(
    before: list[str], edits: dict[int, str], foreign: int, context: int, end: bool
) -> None:
    """A file of few, repeated lines: either exactly the result, or something is left out."""
    base = b"".join(f"{line}\n".encode() for line in before)
    base = base if end else base.removesuffix(b"\n")
    kept = {at: kind for at, kind in edits.items() if at < len(base.splitlines())}
    after = edited(base, kept)
    theirs = b"# theirs\n" * foreign
    old, new = ((theirs + data).decode().splitlines(keepends=True) for data in (base, after))
    text = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(old, new, "a/x.py", "b/x.py", n=context)
    )
    if not text:
        return
    (file,) = diffs.read(text.encode(), "x").files
    applied = places.apply(file.hunks, base, base, None)
    if not applied.left_out:
        assert applied.data == after
    assert places.apply(file.hunks, base, base, []).data == after or foreign
