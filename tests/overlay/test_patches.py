"""Patches apply exactly, reverse exactly, or are refused."""

import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlay.errors import Exit, OverlayError
from overlay.patches import FilePatch, Hunk, Patch, Series, dumps, parse
from series.commits import bare
from support.mini import unified

LINES = st.lists(st.sampled_from(["", "a", "b", "  c", "-- d", "++ e", "@@ -1 +1 @@", "\\ f"]))


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A few lines that repeat a lot, with or without a line feed at the end."""
    body = "\n".join(draw(LINES))
    return (body + draw(st.sampled_from(["", "\n"]))).encode()


def patch(old: bytes, new: bytes) -> Patch:
    return parse("p.patch", b"Description: x\n\n" + unified("vllm/f.py", old, new))


@given(st.lists(texts(), min_size=2, max_size=4))
def test_a_series_applies_and_reverses(versions: list[bytes]) -> None:
    series = Series(patch(old, new) for old, new in pairwise(versions) if old != new)
    assert series.apply("vllm/f.py", versions[0]) == versions[-1]
    assert series.reverse("vllm/f.py", versions[-1]) == versions[0]
    assert series.apply("vllm/other.py", b"kept") == b"kept"


@settings(max_examples=40, deadline=None)
@given(old=texts(), new=texts())
def test_git_agrees(tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes) -> None:
    if old == new:
        return
    folder = tmp_path_factory.mktemp("git")
    for side, data in (("a", old), ("b", new)):
        (folder / side / "vllm").mkdir(parents=True)
        (folder / side / "vllm" / "f.py").write_bytes(data)
    command = ["git", "diff", "--no-index", "-U0", "--no-prefix", "a", "b"]
    diff = subprocess.run(command, cwd=folder, capture_output=True, check=False).stdout
    changed = parse("p.patch", b"".join(bare(diff, lambda _: new)))
    assert changed.files[0].apply(old, "p.patch") == new


def test_a_hunk_names_the_function_or_class_that_it_is_in() -> None:
    new = b"A = 1\nclass B:\n    x = 1\n\n    def f(self):\n        return 1\n"
    diff = b"--- a/vllm/f.py\n+++ b/vllm/f.py\n"
    for line in (1, 3, 6):
        diff += b"@@ -%d,0 +%d @@ def quoted(upstream):\n+%s" % (
            line - 1,
            line,
            new.splitlines(keepends=True)[line - 1],
        )
    data = b"".join(bare(diff, lambda _: new))
    (file,) = parse("p.patch", data).files
    assert [hunk.place for hunk in file.hunks] == ["", "B", "f"]
    assert dumps(Patch("p.patch", "", (file,))) == data
    with pytest.raises(OverlayError, match="quotes nothing"):
        parse("p.patch", data.replace(b"@@ f\n", b"@@ f(self):\n"))


@pytest.mark.parametrize(
    ("old", "new", "base"),
    [
        (b"a\n", b"a\nb\n", b"a"),  # added after a line that lacks its line feed
        (b"a\n", b"b", b"a\nrest\n"),  # lacks its own, and lines follow
    ],
)
def test_a_patch_that_would_join_two_lines_is_refused(old: bytes, new: bytes, base: bytes) -> None:
    (file,) = patch(old, new).files
    assert file.apply(old, "p.patch") == new
    with pytest.raises(OverlayError, match="joins two lines"):
        file.apply(base, "p.patch")


def test_a_hunk_that_comes_to_another_line_is_refused() -> None:
    file = FilePatch("vllm/f.py", (Hunk(1, (), 2, (b"x\n",)),))
    with pytest.raises(OverlayError, match="comes to line 2"):
        file.apply(b"a\nb\n", "p.patch")


@given(old=texts(), new=texts(), other=texts())
def test_another_base_is_refused_or_has_the_same_lines(
    old: bytes, new: bytes, other: bytes
) -> None:
    if old == new:
        return
    (file,) = patch(old, new).files
    try:
        result = file.apply(other, "p.patch")
    except OverlayError as error:
        assert error.code is Exit.FAULT
        assert "vllm/f.py" in str(error)
    else:
        assert file.reversed().apply(result, "p.patch") == other


@pytest.mark.parametrize(
    "path", ["../x.py", "vllm/../../x.py", "/etc/x.py", "vllm", "vllm//x.py", "vllm/./x.py", "x.py"]
)
def test_a_path_that_climbs_out_is_refused(path: str) -> None:
    with pytest.raises(OverlayError, match="not inside the vllm package"):
        parse("p.patch", f"--- a/{path}\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no change"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n", "no hunk"),
        ("--- a/vllm/f.py\n+++ b/vllm/g.py\n@@ -0,0 +1 @@\n+x\n", "expected"),
        ("--- a/vllm/f.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", "expected"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -1,2 +1 @@\n-x\n+y\n", "not a line of a diff"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -1 +1 @@ def f():\n-x\n+y\n", "quotes nothing"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -1,2 +1,2 @@\n x\n-y\n+z\n", "not a line of a diff"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -1 +1 @@\n-x\n+y", "not a line of a diff"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -0,0 +0,0 @@\n", "empty hunk"),
        ("--- a/vllm/f.py\n+++ b/vllm/f.py\n@@ -0,0 +1 @@\n+x\n" * 2, "twice"),
    ],
)
def test_what_is_not_such_a_patch_is_refused(text: str, reason: str) -> None:
    with pytest.raises(OverlayError, match=reason):
        parse("p.patch", text.encode())
