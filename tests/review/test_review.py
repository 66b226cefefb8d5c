"""Whole reviews, of releases with one change each."""

import re
import signal
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from overlay.errors import OverlayError
from packaging.version import Version
from review import __main__ as program
from review import released, report, review, wheels
from review.review import Review
from support import reviews, series, worded
from support.reviews import prepare, release
from support.series import BASE, CHANGES, RUNNER
from support.sites import UPSTREAM, snapshot

# One change each.


def reviewed(root: Path, text: str) -> Review:
    return reviews.reviewed(root, release(text=text))


CONFLICTING = (
    *("a moved block", "a moved call", "a deleted call", "the function is gone"),
    *("a change next to a seam", "a change inside a seam"),
)


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_comes_to_one_verdict(name: str, tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES[name].edit(RUNNER))
    changed = review.UNCHANGED if name == "nothing" else review.CHANGED
    assert result.verdict == (review.CONFLICT if name in CONFLICTING else changed)
    assert (review.UNCHANGED in result.headline) is (name == "nothing")
    assert "clean" not in result.headline


def test_an_obsolete_patch_is_left_out_and_said(tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES["our own change"].edit(RUNNER))
    assert any(each.startswith("0001 is obsolete") for each in result.decisions)
    listed = result.candidate.files["patches/series"].decode().split()
    assert listed == ["0001-edit-2.patch", "0002-edit-3.patch"]


def test_a_hunk_that_merges_into_another_function_is_said(tmp_path: Path) -> None:
    edits = (("def finish(", "def other("), ("def drop(", "def finish("))
    result = reviewed(tmp_path, series.replaced(RUNNER, *edits))
    assert any("merges into Runner.other" in each for each in result.decisions)


def test_a_fix_that_the_release_has_needs_a_decision(tmp_path: Path) -> None:
    """Every patch applies and no name has changed: only the table knows of the mend."""
    overlay, base = worded.checkout(tmp_path / "checkout"), worded.upstream()
    result = review.of_release(overlay, base, worded.release("0.24.0"), tmp_path / "out")
    assert result.verdict == review.CHANGED
    assert [each.partition(":")[0] for each in result.decisions] == [
        "the fix beta is mended (since 0.24.0)",
        "the fix gamma is mended in part (half of it since 0.24.0; no release up to 0.33.0 has the"
        " rest)",
    ]
    assert "the fix beta is mended" in (tmp_path / "out" / "0.24.0" / review.MARKDOWN).read_text()


def test_conflicts_come_first_then_decisions_then_the_rest(tmp_path: Path) -> None:
    text = series.replaced(
        CHANGES["a change inside a seam"].edit(RUNNER), ("LIMIT = 8", "LIMIT = 9")
    )
    result = reviewed(tmp_path, text)
    folder = tmp_path / "out" / "0.23.0"
    written = (folder / review.MARKDOWN).read_text()
    heads = [head.partition(":")[0] for head in re.findall(r"^## (.*)", written, re.MULTILINE)]
    assert heads == ["Patches that conflict", "Needs a decision", "The rest"]
    assert written.index("<<<< release\n") < written.index("<details>")
    assert f"        self.wait(1)\n{'|' * 31} base\n" in written
    names = [f"candidate/conflicts/{p.removesuffix('.patch')}" for p, _ in result.merged.marked]
    assert all(name in written and (folder / name).is_dir() for name in names)


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\u202e</pre>"
    text = series.replaced(RUNNER, ("self.wait()\n", f"self.wait('{hostile}')\n"))
    reviewed(tmp_path, text)
    written = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert "<script>alert(1)</script><U+202E></pre>" in written
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(written)
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown


# The files and the program.


def test_a_folder_that_is_no_review_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "0.23.0" / "precious"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = snapshot(tmp_path / "out")
    with pytest.raises(OverlayError, match="is no review"):
        reviewed(tmp_path, RUNNER)
    assert snapshot(tmp_path / "out") == before


def test_a_review_replaces_the_one_before(tmp_path: Path) -> None:
    reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    where = tmp_path / "out" / "0.23.0"
    assert (where / review.CANDIDATE / "conflicts").exists()
    result = reviewed(tmp_path, RUNNER)
    assert not (where / review.CANDIDATE / "conflicts").exists()
    assert result.headline in (where / review.MARKDOWN).read_text().replace("\\", "")
    assert {file.name for file in where.iterdir()} == {
        review.MARKDOWN,
        review.CANDIDATE,
    }


def test_a_review_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed(tmp_path, RUNNER)
    before = snapshot(tmp_path)

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "markdown", fail)
    with pytest.raises(KeyboardInterrupt):
        reviewed(tmp_path, CHANGES["a line above"].edit(RUNNER))
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "code"), {"nothing": 0, "a new parameter": 10, "a moved call": 11}.items()
)
def test_the_program_reports_the_review(
    name: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, base = series.checkout(tmp_path / "checkout").root, series.upstream(BASE)
    prepare(monkeypatch, root, base, lambda _: release(text=CHANGES[name].edit(RUNNER)))
    command = ["release", "0.23.0", "--no-try", "--out", str(tmp_path / "out")]
    assert program.main([*command, "--check"]) == code
    capsys.readouterr()
    # A review that was made is no failure, whatever it says.
    assert program.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("vLLM 0.23.0: ")
    assert ("conflicts 0001 Edit 1: " in printed) is (code == 11)
    assert printed.endswith(f"report: {tmp_path / 'out' / '0.23.0' / review.MARKDOWN}\n")


def test_the_latest_release_is_called_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In messages, in the directory, and in the command that repeats the review."""
    root, base = series.checkout(tmp_path / "checkout").root, series.upstream(BASE)
    prepare(monkeypatch, root, base, lambda wanted: release(version=wanted))
    monkeypatch.setattr(released, "latest", lambda: Version("0.24.0"))
    program.main(["release", "latest", "--no-try", "--out", str(tmp_path / "out")])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["0.24.0"]
    assert capsys.readouterr().out.startswith("vLLM 0.24.0: ")
    written = (tmp_path / "out" / "0.24.0" / review.MARKDOWN).read_text()
    assert "RELEASE=0.24.0" in written
    assert "latest" not in written


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("release", ""), "'': is neither a version"),
        (("release", "0.22.999"), "0.22.999"),
        (("release", "no/such.whl"), "no/such.whl"),
        (("release", "https://example.org/v.whl"), "https:/example.org/v.whl: cannot be read"),
        (
            ("release", "0.22.1", "--site", "x", "--venv", "y"),
            "--site= name two targets",
        ),
        (("rebase", ""), "'': is neither a version"),
        (("release", "0.23.0", "--site", "/no/such/site"), "/no/such/site"),
    ],
)
def test_a_refusal(
    arguments: tuple[str, ...],
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    if "--site" in arguments:
        monkeypatch.setattr(wheels, "obtain", lambda *_: release())
    out = ("--out", str(tmp_path)) if arguments[0] == "release" else ()
    site = () if "--site" in arguments else ("--site", str(UPSTREAM))
    assert program.main([*arguments, *site, *out]) not in (0, 1, 10, 11)
    printed = capsys.readouterr().err
    assert reason in printed
    assert "next" in printed
