"""Runs of upstream's test files on both copies, and what they show."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare.installations import SIDES, Installations, work_beside
from bench.compare.turns import in_turn
from bench.errors import Failure
from environment.making import has_nvidia_gpu
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation
from overlay.source import Overlay

from conformance import archive, outcomes, selection
from conformance.outcomes import Outcome, Verdict

ROOT = Path(__file__).resolve().parents[2]
#: A download fails at once instead of after retries; the environment may say otherwise.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
#: What upstream's tests need and an installation of vLLM lacks.
LIBRARIES = ("pytest", "tblib")

Verdicts = Mapping[str, tuple[Verdict, str]]


@dataclass(frozen=True)
class Result:
    """What all files showed.

    Attributes:
        installation: its name and version.
        files: test file to its tests' verdicts.
    """

    installation: str
    files: Mapping[str, Verdicts]

    def tests(self, verdict: Verdict) -> dict[str, str]:
        """The tests with a verdict, and the reason of each."""
        return {
            test: reason
            for verdicts in self.files.values()
            for test, (given, reason) in verdicts.items()
            if given is verdict
        }

    @property
    def regressions(self) -> dict[str, str]:
        """The tests that pass on the pristine copy alone, and how each fails."""
        return self.tests(Verdict.PRISTINE)

    def counts(self, file: str) -> Counter[Verdict]:
        """How many tests of a file have each verdict."""
        return Counter(verdict for verdict, _ in self.files[file].values())

    def to_json(self) -> dict[str, Any]:
        """The counts by file, and every test that did not pass on both copies, by verdict."""
        counted = {file: self.counts(file) for file in self.files}
        return {
            "installation": self.installation,
            "files": {
                file: {verdict.value: counts[verdict] for verdict in Verdict}
                for file, counts in counted.items()
            },
            "total": {
                verdict.value: sum(counts[verdict] for counts in counted.values())
                for verdict in Verdict
            },
            "tests": {
                verdict.value: self.tests(verdict)
                for verdict in Verdict
                if verdict is not Verdict.BOTH
            },
            "left out": dict(selection.LEFT_OUT),
        }

    def table(self) -> str:
        """The counts, a row per file, and the tests that pass on one copy alone or were not run."""
        counted = [(file, self.counts(file)) for file in self.files]
        total: Counter[Verdict] = sum((counts for _, counts in counted), Counter())
        width = max(len(file) for file in [*self.files, self.installation])
        lines = ["  ".join([self.installation.ljust(width), *(each.value for each in Verdict)])]
        for file, counts in [*counted, ("total", total)]:
            cells = (str(counts[each]).rjust(len(each.value)) for each in Verdict)
            lines.append("  ".join([file.ljust(width), *cells]))
        for verdict in (Verdict.PRISTINE, Verdict.OVERLAID, Verdict.NOT_RUN):
            tests = self.tests(verdict)
            lines += [f"{verdict.value}: {test}: {reason}" for test, reason in tests.items()]
        return "\n".join(lines)


def run(
    target: Installation,
    folder: Path,
    tests: Path | None = None,
    files: Sequence[str] = (),
    timeout: float = 1200.0,
) -> Result:
    """Run test files on a pristine and an overlaid copy of an installation, by turns.

    Args:
        target: the installation; it stays as it is.
        folder: keeps the source archive, and a log per file and copy.
        tests: the unpacked source archive; without it, it is fetched.
        files: which test files; without them, those selected.
        timeout: seconds for one file on one copy.

    Raises:
        OverlayError: upstream's tests cannot be had, a file is unknown, one that imports a
            patched module is neither selected nor left out, or a library is missing.
        Failure: there is no pristine or overlaid copy to be made.
    """
    overlay = Overlay.load(ROOT)
    source = archive.given(tests) if tests else archive.obtain(overlay.pin, folder)
    selection.check(source, overlay.targets)
    if unknown := [file for file in files if not (source / file).is_file()]:
        raise OverlayError(
            Exit.USAGE,
            "is no file of upstream's tests",
            subject=unknown[0],
            next_step="name one as it is called there: tests/v1/sample/test_sampler.py",
        )
    python = str(target.interpreter or sys.executable)
    _check_libraries(python, target.site)
    work = work_beside(target.site)
    try:
        sides = Installations(target.site, work, python)
        compared = {
            file: compare(sides, python, source, file, folder / "logs", timeout, turn)
            for turn, file in enumerate(files or selected())
        }
        sides.check_untouched()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Result(target.title, compared)


def _check_libraries(python: str, site: Path) -> None:
    """Refuse an interpreter that lacks what upstream's ``conftest.py`` needs.

    Raises:
        OverlayError: it cannot import a library.
    """
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [python, "-c", f"import {', '.join(LIBRARIES)}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OverlayError(
            Exit.USAGE,
            done.stderr.strip().rpartition("\n")[2] or "does not run",
            subject=python,
            next_step=f"install {' and '.join(LIBRARIES)} in a directory, and put it on PYTHONPATH",
        )


def selected() -> tuple[str, ...]:
    """The test files that this machine can run."""
    return selection.EVERYWHERE + (selection.ON_A_GPU if has_nvidia_gpu() else ())


def compare(
    sides: Installations,
    python: str,
    source: Path,
    file: str,
    logs: Path,
    timeout: float,
    turn: int = 0,
) -> Verdicts:
    """Run one test file on both copies, each in a process of its own.

    Args:
        sides: the copies.
        python: the interpreter; it needs pytest and what upstream's ``conftest.py`` imports.
        source: upstream's unpacked source archive.
        file: a test file in it.
        logs: keeps each copy's log and JUnit XML.
        timeout: seconds for one copy.
        turn: which copy is first: the copies take turns.

    Raises:
        Failure: pytest could not collect the file on either copy.
    """
    found: dict[str, dict[str, Outcome]] = {}
    name = file.removesuffix(".py").replace("/", ".")
    for side in in_turn(turn):
        into = logs / side
        into.mkdir(parents=True, exist_ok=True)
        report, log = into / f"{name}.xml", into / f"{name}.log"
        report.unlink(missing_ok=True)
        command = [python, "-m", "pytest", f"--rootdir={source}", f"--junit-xml={report}"]
        command += ["-p", "no:cacheprovider", "--tb=short", "-q", file]
        sides.run(side, command, log, timeout, ENVIRONMENT, cwd=source)
        found[side] = outcomes.read(report)
    if not any(found.values()):
        raise Failure(f"{file} gave no result on either copy; see {log}")
    return outcomes.compare(*(found[side] for side in SIDES))
