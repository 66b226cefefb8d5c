"""The README's measured figures are those of the committed runs, and stand nowhere else."""

import hashlib
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from bench import readme, report
from bench.sides import Failure
from overlay import pin
from overlay.source import PROVENANCE
from support import runs
from support.sites import REPO

PROGRAM = REPO / "scripts" / "bench" / "readme.py"
COMMITTED = sorted(readme.RUNS.glob("*"))

#: What a measured figure looks like: times, speeds, ratios to stock, cells of a table.
FIGURE = re.compile(
    r"""(?x)
    (?<![\w.]) [\d][\d.,]* \s*
    (?: (?: [mµun]s | s | min | minutes? | hours? | (?:milli|micro|nano)?seconds? ) \b
      | (?: tok | tokens? ) \s* (?: / \s* s (?: ec )? \b | (?:a|per) \s+ second )
      | % | percent \b | × | x \b | -fold
      | times \s+ (?: as \s | faster | slower | longer | stock | upstream | that | the )
    )
    | \d\.\d+ \s+ (?: of | against ) \s+ (?: stock | upstream | that )
    | \b (?: twice | thrice | double | half | a \s+ third ) \s+ (?: as | of | the | an? ) \s+
      (?: fast | slow | long | time | speed | throughput | second | minute | hour | stock )
    | \| \s* \d+[.,]\d+ \s* \|
    """
)
#: Phrases that hold a figure which nobody measured: limits and definitions.
ALLOWED = ("a 4 ms step", "under 1%", "within 2%", "up to 40 ms", "at least 250 ms")


def figures(text: str) -> list[tuple[int, str]]:
    """The measured figures outside of a README's blocks, and the lines they begin in."""
    kept = dict(readme.outside(text))
    bare = "\n".join(kept.get(n, "") for n in range(1, text.count("\n") + 2))
    # Inline code: commands and names, whose numbers are arguments.
    bare = re.sub(
        r"(?<!`)`(?!`)(?:[^`\n]|\n(?!\n))+`", lambda found: re.sub(r"[^\n]", " ", found[0]), bare
    )
    for phrase in ALLOWED:
        words = r"\s+".join(map(re.escape, phrase.split()))
        bare = re.sub(words, lambda found: re.sub(r"[^\n]", " ", found[0]), bare)
    return [(bare.count("\n", 0, found.start()) + 1, found[0]) for found in FIGURE.finditer(bare)]


def test_the_readme_is_what_the_runs_make_it() -> None:
    assert readme.stale(readme.README.read_text(), readme.RUNS) is None


def test_every_run_is_shown_in_the_readme() -> None:
    shown = {f"{block.run}.json" for block in readme.blocks(readme.README.read_text())}
    assert shown
    assert {file.name for file in COMMITTED} == shown


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.name)
def test_a_committed_run_says_how_to_repeat_it(file: Path) -> None:
    run = report.load(file)
    assert run["machine"]["device"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run["date"])
    assert re.search(r"scripts/\w+|make \w+", run["command"])
    for name in ("vllm", "torch", "overlay"):
        assert run["versions"][name], name


#: Measured with a working tree whose state was never committed.
UNCOMMITTED = {"5aaa6e3839a1"}


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=True).stdout


def digest_of(pinned: bytes) -> str:
    """The digest of an installation that the overlay with this pin was laid over."""
    files = dict(pin.loads(pinned.decode()).result)
    files[f"{PROVENANCE}/{pin.NAME}"] = hashlib.sha256(pinned).hexdigest()
    lines = (f"{sha256}  {path}\n" for path, sha256 in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def test_each_run_measured_an_overlay_that_was_committed() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("a shallow clone does not have the pins of earlier commits")
    commits = git("log", "--format=%H", "--", pin.NAME).decode().split()
    known = {digest_of(git("show", f"{commit}:{pin.NAME}")) for commit in commits}
    measured = {
        file.name: report.load(file)["digests"]["overlaid"]
        for file in COMMITTED
        if report.load(file)["digests"]
    }
    assert measured
    unknown = {name for name, digest in measured.items() if digest not in known}
    assert {measured[name][:12] for name in unknown} <= UNCOMMITTED, unknown


@pytest.mark.parametrize(
    "file", [file for file in COMMITTED if report.load(file)["kind"] == "engine"], ids=str
)
def test_medians_and_ratios_are_those_of_the_rounds(file: Path) -> None:
    run = report.load(file)
    assert run["errors"] == []
    seen = 0
    for row in run["rows"].values():
        for case in row["cases"].values():
            for values in case["figures"].values():
                medians = {}
                for side in row["sides"]:
                    rounds = [value for value in values["rounds"][side] if value is not None]
                    medians[side] = statistics.median(rounds) if rounds else None
                    assert values[side] == medians[side]
                for side, ratio in values["ratios"].items():
                    if ratio is not None:
                        assert not report.reasons(case, side)
                        ours, stock = medians[side], medians["stock"]
                        assert ours is not None
                        assert stock
                        assert ratio == pytest.approx(ours / stock)
                        seen += 1
    assert seen


def test_the_readme_has_no_figure_that_no_run_has() -> None:
    assert figures(readme.README.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "took 0.14 s, or",
        "```\nmake `date`\n``` took 0.14 s",
        "makes 38,380 tokens\na second",
        "12 tok/s",
        "it was 4.09 ms",
        "5 µs",
        "is 3x faster",
        "half: 1.3 times stock's",
        "0.97 of stock's",
        "some 10% more",
        "took 10 minutes",
        "| case | 7.162 | 0.145 |",
        "| all | 1,024 |",
        "2,274 times faster than stock",
        "404 times as fast",
        "1.3 times faster",
        "twice as fast",
        "12 percent",
        "5,061 tokens/sec",
        "5061 tok/sec",
        "takes half a minute",
    ],
)
def test_a_figure_outside_of_a_block_is_found(text: str) -> None:
    assert len(figures(f"# Title\n\n{text}\n")) == 1
    assert figures(f"# Title\n<!-- run: a -->\n{text}\n<!-- /run -->\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "a CPython from 3.10 to 3.14, and vLLM 0.22.0",
        "5.7 GB, 256 MiB and 0.61 MB at 151,936",
        "| 0 | done, or already so |",
        "costs under 1% of a 4 ms step",
        "`--timeout 5 s` or `sleep 3s`",
        "```\nmake bench `date`\n```\n\nand `--timeout\n5 s`",
        "a budget of 4,096 tokens and 4 bytes a token; 128 requests",
        "3 fences in 4,200 steps, where stock waited 4,199 times",
    ],
)
def test_sizes_versions_limits_and_counts_are_no_figures(text: str) -> None:
    assert figures(text) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a run of each kind."""
    for name, run in (("engine", runs.engine()), ("table", runs.table())):
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    return tmp_path


TEXT = """# Title

<!-- run: engine issue-43450 cpu-like -->
<!-- /run -->

Between.

<!-- run: engine issue-43450; cases: no history | mixed, batch 8;
     figures: fences, a step | ITL p50 -->
old
<!-- /run -->

<!-- run: table -->
<!-- /run -->
"""


def change(folder: Path, name: str, **changed: object) -> None:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_blocks_are_made_of_their_runs(folder: Path) -> None:
    made = readme.rewritten(TEXT, folder)
    assert readme.stale(TEXT, folder) is not None
    assert readme.stale(made, folder) is None
    assert readme.rewritten(made, folder) == made
    assert [line for _, line in readme.outside(made)] == [
        line for line in TEXT.splitlines() if line != "old"
    ]
    first, second, third = (made[block.start : block.end] for block in readme.blocks(made))
    assert "| mixed, batch 8 | ITL p99 | 8.092 | 7.995 | 7.947 | 0.988 ~ | 0.982 ~ |" in first
    assert "| none | ITL p50 | 6.680 | 6.600 | 0.988 ~ |" in first
    assert "| none | sample_tokens p50 " not in first  # seen on no side
    assert "**prime-rl-2772**" not in first
    for part in ("H100", "2026-11-21", "vLLM 0.22.0", "3 rounds", "scripts/bench/engine.py"):
        assert part in first
    lines = [line.split(" | ")[:2] for line in second.splitlines() if line.startswith("| ")][2:]
    assert lines == [
        [f"| {case}", figure]
        for case in ("no history", "mixed, batch 8")
        for figure in ("fences, a step", "ITL p50")
    ]
    assert "| penalties | 12,288 | 59.60 | 0.1404 | refused |" in third
    assert "- refused: penalties, 12288: the logits differ" in third


def test_a_refused_ratio_is_not_in_the_readme_and_its_reason_is(folder: Path) -> None:
    run = runs.engine()
    runs.refuse(run["rows"]["issue-43450"]["cases"]["no history"], "overlaid", "tokens differ")
    change(folder, "engine", **run)
    made = readme.rewritten(TEXT, folder)
    assert "| no history | ITL p50 | 6.680 | 6.600 | 6.560 | refused | 0.982 ~ |" in made
    assert "- no history: overlaid: tokens differ." in made


def test_one_changed_digit_is_found_wherever_it_is(folder: Path) -> None:
    made = readme.rewritten(TEXT, folder)
    inside = [
        at
        for block in readme.blocks(made)
        for at in range(block.start, block.end)
        if made[at].isdigit()
    ]
    assert len(inside) > 500
    for at in inside[::7]:
        planted = made[:at] + str((int(made[at]) + 1) % 10) + made[at + 1 :]
        found = readme.stale(planted, folder)
        assert found is not None
        assert found.startswith(f"README line {made.count(chr(10), 0, at) + 1} ")
    run = json.loads((folder / "engine.json").read_text())
    run["rows"]["cpu-like"]["cases"]["none"]["figures"]["ITL p99"]["overlaid"] += 0.001
    change(folder, "engine", **run)
    assert "ITL p99" in (readme.stale(made, folder) or "")


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("<!-- run: missing -->\n<!-- /run -->", r"line 1.*missing\.json"),
        ("<!-- run: engine nobody -->\n<!-- /run -->", "no row 'nobody'"),
        ("<!-- run: engine cpu-like; cases: x -->\n<!-- /run -->", "no case 'x'"),
        ("<!-- run: engine cpu-like; figures: ITL p5 -->\n<!-- /run -->", "no figure 'ITL p5'"),
        ("<!-- run: engine; rows: x -->\n<!-- /run -->", "names a run"),
        ("<!-- run: -->\n<!-- /run -->", "names a run"),
        ("<!-- run: table x -->\n<!-- /run -->", "shown whole"),
        ("<!-- run: table -->\n", "not closed"),
        ("<!-- run: table -->\n<!-- run: table -->\n<!-- /run -->", "not closed"),
        ("<!-- /run -->\n<!-- run: table -->\n<!-- /run -->", "closes nothing"),
        ("<!-- run: table -->\n<!-- /run -->\n<!-- /run -->", "closes nothing"),
    ],
)
def test_a_block_that_cannot_be_made_is_named(folder: Path, mark: str, said: str) -> None:
    with pytest.raises(Failure, match=said):
        readme.rewritten(mark, folder)


def test_a_run_that_was_cut_off_is_called_so(folder: Path) -> None:
    assert report.CUT_OFF not in readme.rewritten(TEXT, folder)
    change(folder, "engine", complete=False)
    assert report.CUT_OFF in readme.rewritten(TEXT, folder)


def test_the_command_rewrites_and_checks(folder: Path) -> None:
    file = folder / "README.md"
    file.write_text(TEXT)

    def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, PROGRAM, "--readme", file, "--runs", folder, *arguments]
        return subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)

    checked = command("--check")
    assert checked.returncode == 1
    assert "README line 4 differs from the run engine" in checked.stderr
    assert file.read_text() == TEXT
    assert command().returncode == 0
    assert file.read_text() == readme.rewritten(TEXT, folder)
    assert command("--check").returncode == 0
    (folder / "table.json").unlink()
    for arguments in (["--check"], []):
        refused = command(*arguments)
        assert refused.returncode == 1
        assert "table.json" in refused.stderr
        assert "Traceback" not in refused.stderr
