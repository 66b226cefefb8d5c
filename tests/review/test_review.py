"""Whole reviews, of releases with one change each, and the program."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from overlay.errors import OverlayError
from overlay.source import Overlay
from review import __main__ as program
from review import report, review, verdict, wheels
from review.verdict import Review
from series.refresh import refresh
from support import checkouts, reviews, series
from support.reviews import prepare, release
from support.series import BASE, CHANGES, EDITS, OTHER, PATH, RUNNER, replaced
from support.sites import UPSTREAM, snapshot

CONFIG = "vllm/config/vllm.py"
SELECTOR = "class C:\n    @property\n    def use_v2_model_runner(self):\n        return True\n"


def reviewed(root: Path, text: str) -> Review:
    return reviews.reviewed(root, release(text=text))


@pytest.mark.parametrize("name", CHANGES)
def test_one_change_comes_to_one_verdict(name: str, tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES[name].edit(RUNNER))
    same = name in ("nothing", "a line below", "a line above")
    changed = verdict.UNCHANGED if same else verdict.CHANGED
    conflicts = "conflicts" in CHANGES[name].verdicts
    assert result.verdict == (verdict.CONFLICT if conflicts else changed)
    assert (verdict.UNCHANGED in result.headline) is same
    obsolete = any(each.startswith("0001 is obsolete") for each in result.decisions)
    assert obsolete is (name == "our own change")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SELECTOR.replace("True", "False"), f"`use_v2_model_runner` decides, at `{CONFIG}:3`"),
        (SELECTOR.replace("use_v2", "use"), "0.23.0 has no use_v2_model_runner"),
    ],
)
def test_another_decision_which_runner_serves_is_shown(
    text: str, said: str, tmp_path: Path
) -> None:
    base = {**BASE, CONFIG: SELECTOR}
    result = reviews.reviewed(tmp_path, release({**base, CONFIG: text}), series.upstream(base))
    assert result.verdict == verdict.CHANGED
    assert any("which model runner serves is not 0.22.0's" in each for each in result.decisions)
    written = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")
    assert said in written
    assert ("+        return False" in written) is ("False" in text)


METADATA = """Name: vllm
Requires-Python: <3.15,>=3.10
Requires-Dist: numpy
Requires-Dist: torch==2.11.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.11.0; platform_system == "Darwin"
"""


@pytest.mark.parametrize(
    ("old", "new", "version", "said"),
    [
        ("<3.15,>=3.10", ">=3.10, <3.15", "0.23.0", ""),
        ("numpy", "numpy<9", "0.23.0", ""),
        ("2.11.0+cpu", "2.11.0", "0.23.0", ""),
        ("<3.15,>=3.10", ">=3.11", "0.23.0", "asks for Python >=3.11; it was <3.15,>=3.10"),
        ("==2.11.0", "==2.12.0", "0.23.0", "asks for torch 2.12.0; it was 2.11.0"),
        ("", "", "0.34.0", "mends are known up to 0.33.0"),
    ],
)
def test_another_python_or_torch_and_an_unread_release_need_a_decision(
    old: str, new: str, version: str, said: str, tmp_path: Path
) -> None:
    base = replace(series.upstream(BASE), metadata=METADATA)
    upstream = replace(base, metadata=METADATA.replace(old, new))
    of = replace(release(version=version), upstream=upstream)
    result = reviews.reviewed(tmp_path, of, base)
    assert result.verdict == (verdict.CHANGED if said else verdict.UNCHANGED)
    assert [said in each for each in result.decisions] == [True] * bool(said)


def test_conflicts_come_first_then_decisions_then_the_rest(tmp_path: Path) -> None:
    edits = (("LIMIT = 8", "LIMIT = 9"), ("list(rows)", "[*rows]"))
    result = reviewed(tmp_path, replaced(CHANGES["a change inside a seam"].edit(RUNNER), *edits))
    written = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    heads = [head.partition(":")[0] for head in re.findall(r"^## (.*)", written, re.MULTILINE)]
    assert heads == ["Patches that conflict", "Needs a decision", "The rest"]
    assert f"        self.wait(1)\n{'|' * 31} base\n" in written
    assert "Our modules use: 2 changed" in written
    assert "-LIMIT = 8\n+LIMIT = 9\n" in written
    assert "1 applies, 2 conflicts" in written
    assert result.headline in written.replace("\\", "")


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\u202e</pre>"
    text = replaced(RUNNER, ("self.wait()\n", f"self.wait('{hostile}')\n"))
    reviewed(tmp_path, text)
    written = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert "<script>alert(1)</script><U+202E></pre>" in written
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(written)
    assert "<script" not in shown
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown
    assert report.escape("a_b|<c>\n*") == r"a\_b\|\<c\> \*"
    assert (report.code("a|b"), report.code("`a`")) == (r"`a\|b`", r"\`a\`")


def test_a_folder_that_is_no_review_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "out" / "0.23.0" / "precious"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(OverlayError, match="is no review"):
        reviewed(tmp_path, RUNNER)
    assert mine.read_text() == "mine"


def test_a_review_replaces_the_one_before_unless_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed(tmp_path, RUNNER)
    where = tmp_path / "out" / "0.23.0"
    assert (where / review.CANDIDATE / "VERSION_PIN").exists()
    reviewed(tmp_path, CHANGES["a change inside a seam"].edit(RUNNER))
    assert [file.name for file in where.iterdir()] == [review.MARKDOWN]
    before = snapshot(tmp_path)

    def fail(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "markdown", fail)
    with pytest.raises(KeyboardInterrupt):
        reviewed(tmp_path, RUNNER)
    assert snapshot(tmp_path) == before


# The program


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
    prepare(monkeypatch, tmp_path, release(text=CHANGES[name].edit(RUNNER)))
    command = ["release", "0.23.0", "--no-try", "--out", str(tmp_path / "out")]
    assert program.main([*command, "--check"]) == code
    capsys.readouterr()
    # A review that was made is no failure, whatever it says.
    assert program.main(command) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("vLLM 0.23.0: ")
    assert ("conflicts 0001 Edit 1: in Runner.sample" in printed) is (code == 11)
    assert printed.endswith(f"report: {tmp_path / 'out' / '0.23.0' / review.MARKDOWN}\n")


@pytest.mark.parametrize("now", ["vllm/v1/runner/__init__.py", "vllm/v1/worker/running.py"])
def test_a_rebase_follows_a_file(
    now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new = replaced(RUNNER, ("LIMIT = 8", "LIMIT = 9"))
    root = prepare(monkeypatch, tmp_path, release({OTHER: "", now: new}))
    assert program.main(["rebase", "0.23.0"]) == 0
    assert "make refresh" in capsys.readouterr().out
    assert checkouts.git(root / "build" / "edit", "status", "--porcelain").stdout == ""
    refresh(root, dry_run=False)
    overlay = Overlay.load(root)
    assert overlay.targets == [now]
    assert overlay.series.apply(now, new.encode()).decode() == replaced(new, *EDITS)


def test_a_rebase_that_stops_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CHANGES["a change inside a seam"].edit(RUNNER)
    prepare(monkeypatch, tmp_path, release(text=text))
    assert program.main(["rebase", "0.23.0"]) == 11
    assert f"conflict  {PATH}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("release", ""), "'': is neither a version"),
        (("release", "0.22.1", "--site", "x", "--venv", "y"), "--site= name two targets"),
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
    site = () if "--site" in arguments else ("--site", str(UPSTREAM))
    assert program.main([*arguments, *site, "--out", str(tmp_path)]) not in (0, 1, 10, 11)
    printed = capsys.readouterr().err
    assert reason in printed
    assert "next" in printed
