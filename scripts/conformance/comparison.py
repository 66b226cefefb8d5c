"""Runs of upstream's test files on both copies, and what they show."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import Failure
from bench.harness.installations import SIDES, Installations, installed
from environment.making import has_nvidia_gpu
from overlay.errors import Exit, OverlayError
from overlay.installation import Installation
from overlay.source import Overlay

from conformance import archive, outcomes, selection
from conformance.outcomes import Outcome, Verdict

ROOT = Path(__file__).resolve().parents[2]
#: A download fails at once instead of after retries; threads of tiny tensors only wait.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
#: Seconds for each file.
TIMEOUT = 600.0

Verdicts = Mapping[str, tuple[Verdict, str]]


@dataclass(frozen=True)
class Result:
    """The verdicts on all tests.

    Attributes:
        installation: its name and version.
        files: test file to its tests' verdicts.
        notes: which files were not run, and why.
    """

    installation: str
    files: Mapping[str, Verdicts]
    notes: Sequence[str] = ()

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
        """The tests that pass on the pristine copy alone, but for :data:`selection.MENDED`."""
        failed = self.tests(Verdict.PRISTINE)
        return {test: how for test, how in failed.items() if test not in selection.MENDED}

    def counts(self, file: str) -> Counter[Verdict]:
        """Count the tests of a file by verdict."""
        return Counter(verdict for verdict, _ in self.files[file].values())

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
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def run(
    target: Installation,
    folder: Path,
    tests: Path | None = None,
    files: Sequence[str] = (),
    as_listed: bool = False,
) -> Result:
    """Run test files on a pristine and an overlaid copy of an installation.

    Args:
        target: the installation; it stays as it is.
        folder: keeps the source archive, and the logs of each copy.
        tests: the unpacked source archive; without it, it is fetched.
        files: which test files; without them, those that this machine can run.
        as_listed: run what is listed and there, and only note what the lists do not fit.

    Raises:
        OverlayError: upstream's tests cannot be had, a file is unknown, one that imports a
            patched module is neither selected nor left out.
        Failure: there is no pristine or overlaid copy to be made, or a file gave no result.
    """
    overlay = Overlay.load(ROOT)
    source = archive.given(tests) if tests else archive.obtain(overlay.pin, folder)
    notes: list[str] = []
    if as_listed:
        notes = list(_notes(*selection.differences(source, overlay.targets)))
    else:
        selection.check(source, overlay.targets)
    if unknown := [file for file in files if not (source / file).is_file()]:
        raise OverlayError(
            Exit.USAGE,
            "is no file of upstream's tests",
            subject=unknown[0],
            next_step="name one as it is called there: tests/v1/sample/test_sampler.py",
        )
    python = str(target.interpreter or sys.executable)
    selected = selection.EVERYWHERE + (selection.ON_A_GPU if has_nvidia_gpu() else ())
    selected = tuple(file for file in selected if (source / file).is_file())
    with installed(target.site, python) as sides:
        compared = compare(sides, source, files or selected, folder / "logs")
        sides.check_untouched()
    return Result(target.title, compared, notes)


def _notes(unlisted: Collection[str], missing: Collection[str]) -> Iterator[str]:
    """Sentences on what :func:`selection.differences` finds."""
    if unlisted:
        yield f"import patched modules and were not run: {', '.join(sorted(unlisted))}"
    if missing:
        yield f"are listed and not in this release: {', '.join(sorted(missing))}"


def compare(
    sides: Installations, source: Path, files: Sequence[str], logs: Path
) -> dict[str, Verdicts]:
    """Run test files of a source archive on both copies; return each file's verdicts.

    Raises:
        Failure: a file gave no result on either copy.
    """
    results = {side: _run(sides, side, source, files, logs) for side in SIDES}
    for file in files:
        if not any(results[side][file] for side in SIDES):
            needed = "the interpreter needs pytest and tblib, which vLLM does not bring"
            raise Failure(f"{file} gave no result on either copy; see {logs}; {needed}")
    return {file: outcomes.compare(*(results[side][file] for side in SIDES)) for file in files}


def _run(
    sides: Installations, side: str, source: Path, files: Sequence[str], logs: Path
) -> dict[str, dict[str, Outcome]]:
    """Run test files on one copy in one process, and those that gave no result alone.

    Most of the time of a file is spent on importing vLLM; but a crash takes all results along.
    """
    results = _pytest(sides, side, source, files, logs / side)
    for file in files:
        if not results[file] and len(files) > 1:
            name = file.removesuffix(".py").replace("/", ".")
            results |= _pytest(sides, side, source, [file], logs / side / name)
    return results


def _pytest(
    sides: Installations, side: str, source: Path, files: Sequence[str], logs: Path
) -> dict[str, dict[str, Outcome]]:
    logs.mkdir(parents=True, exist_ok=True)
    report = logs / "report.xml"
    report.unlink(missing_ok=True)
    arguments = ["-m", "pytest", f"--rootdir={source}", f"--junit-xml={report}"]
    arguments += ["-p", "no:cacheprovider", "-p", f"{__package__}.frozen_imports"]
    arguments += ["--tb=short", "-q", *files]
    timeout = TIMEOUT * len(files)
    sides.run(side, arguments, logs / "log", timeout, ENVIRONMENT, cwd=source)
    return outcomes.read(report, files)
