"""Try a release: overlay an environment of it, serve from it, and run its own tests.

All of it is below build/try. The environment has the CPU build, which any machine can run.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environment import making
from environment.children import children_environment
from overlay.pin import PACKAGE
from series.tree import write_file

from review.requirements import TORCH, asked
from review.wheels import Release

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
#: The steps, in their order, and the seconds that each may take.
STEPS = {"environment": 3600.0, "overlay": 300.0, "serving": 1800.0, "conformance": 14400.0}

#: Characters of the end of a log that the review quotes.
_QUOTED = 1500
#: The server's log says so if the overlay is on.
_ON = "Readiness overlay "


@dataclass(frozen=True)
class Step:
    """A step of a trial.

    Attributes:
        name: one of :data:`STEPS`.
        outcome: :data:`PASSED`, :data:`FAILED` or :data:`NOT_RUN`.
        detail: the end of its output, or why it was not run.
    """

    name: str
    outcome: str
    detail: str


def examine(root: Path, release: Release, files: Mapping[str, bytes]) -> list[Step]:
    """Try a candidate.

    Args:
        root: the checkout; the trial is in its build/try.
        release: the one under review.
        files: of the candidate, by path; none if it conflicts or is faulty.
    """
    reason = "" if files else "the candidate conflicts or is faulty"
    folder = root / "build" / "try" / release.version
    if not reason:
        _lay_out(root, folder / "checkout", release, files)
    steps: list[Step] = []
    for name in STEPS:
        if name == "conformance" and f"vllm-{release.version}.tar.gz" not in release.archives:
            reason = reason or "the package index lists no source archive"
        steps.append(Step(name, NOT_RUN, reason) if reason else _try(name, folder))
        if not reason and steps[-1].outcome != PASSED:
            reason = f"{name} has to come first"
    return steps


def summary(steps: Sequence[Step]) -> str:
    """Return the outcome of a trial, with the step and the reason if it did not pass."""
    if not steps:
        return "not run: it was not asked for"
    stopped = next((each for each in steps if each.outcome != PASSED), None)
    return f"{stopped.outcome} at {stopped.name}: {stopped.detail}" if stopped else PASSED


def _try(step: str, folder: Path) -> Step:
    environment = str(folder / "env")
    python = f"{environment}/bin/python"
    command = {
        "environment": [sys.executable, "-m", "environment", "test", "--no-programs", environment],
        "overlay": [python, "-m", "overlay", "apply", "--venv", environment],
        "serving": [python, "-m", "demo"],
        "conformance": [python, "-m", "conformance", "--as-listed", "--venv", environment],
    }[step]
    log = folder / f"{step}.log"
    code = _run(command, folder / "checkout", log, STEPS[step])
    # A report has no paths of this machine.
    text = log.read_text(errors="replace").replace(f"{folder}/", "")
    detail = "; ".join(line.strip() for line in text.splitlines() if line.strip())[-_QUOTED:]
    outcome = FAILED if code else PASSED
    if code is None:
        outcome, detail = FAILED, f"no end after {STEPS[step]:g} s"
    elif step == "environment" and code:
        outcome, detail = NOT_RUN, f"it could not be made: {detail}"
    elif step == "serving" and not code and _ON not in text:
        outcome, detail = FAILED, f"no overlay is on: {detail}"
    return Step(step, outcome, f"{detail} ({log.relative_to(folder.parents[2])})")


def _run(command: Sequence[str], checkout: Path, log: Path, patience: float) -> int | None:
    """Run a program of the checkout.

    Returns:
        The exit code, or None if it did not end in time.
    """
    environment = children_environment() | {
        "PYTHONPATH": str(checkout / "scripts"),
        "PYTHONSAFEPATH": "make",
        "UV": making.find_uv(),
    }
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=checkout, stdout=sink, stderr=subprocess.STDOUT, env=environment
        )
        try:
            return process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # A server is ended by the program that has started it, if that is asked nicely.
            for end in (process.terminate, process.kill):
                end()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(120)


def _lay_out(root: Path, checkout: Path, release: Release, files: Mapping[str, bytes]) -> None:
    """Copy the checkout, with the candidate in the place of the overlay's own patches."""
    shutil.rmtree(checkout, ignore_errors=True)
    for name in ("scripts", f"vendor_overlay/{PACKAGE}"):
        if (root / name).is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(root / name, checkout / name, ignore=skipped)
    for name, data in files.items():
        write_file(checkout / name, data)
    if (project := root / "pyproject.toml").is_file():
        shutil.copy(project, checkout)
    overrides = checkout / "scripts" / "environment" / "cpu-overrides.txt"
    lines = [
        f"{name}=={asked(release.upstream.metadata)[TORCH]}\n" for name in (TORCH, "torchaudio")
    ]
    # The pinned release's overrides name its torch; torchaudio has torch's own number.
    if overrides.is_file() and lines[0] not in overrides.read_text():
        overrides.write_text("".join(lines))
