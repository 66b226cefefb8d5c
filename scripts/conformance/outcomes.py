"""Outcomes of tests, read from JUnit XML, and their comparison."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

#: How Hugging Face's libraries and vLLM report a file that is not in the local cache.
_NO_DOWNLOAD = re.compile(
    r"huggingface\.co|LocalEntryNotFoundError|OfflineModeIsEnabled"
    r"|Invalid repository ID or local directory specified: '[\w-]+/"
    r"|NameResolutionError|Name or service not known"
)


class Verdict(enum.Enum):
    """Outcomes of one test on both copies; each is a column of the table."""

    BOTH = "passed on both"
    NEITHER = "failed on both"
    SKIPPED = "skipped"
    NOT_RUN = "not run"
    PRISTINE = "only pristine"
    OVERLAID = "only overlaid"


@dataclass(frozen=True)
class Outcome:
    """One test's outcome on one copy.

    Attributes:
        status: ``passed``, ``failed``, ``skipped``, ``not run`` (it needs a download) or
            ``missing`` (the process ended before it).
        reason: the first line of the failure, or why it was skipped.
    """

    status: str
    reason: str = ""


MISSING = Outcome("missing", "no result: the process ended before this test did")


def read(report: Path, files: Sequence[str]) -> dict[str, dict[str, Outcome]]:
    """Read pytest's JUnit XML.

    Args:
        report: the XML; missing if the process ended early.
        files: the test files that were run.

    Returns:
        Test file to test to outcome, in the order of the report.
    """
    outcomes: dict[str, dict[str, Outcome]] = {file: {} for file in files}
    modules = {file.removesuffix(".py").replace("/", "."): outcomes[file] for file in files}
    if not report.is_file():
        return outcomes
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (our own pytest's)
        test, outcome = f"{case.get('classname')}::{case.get('name')}", _outcome(case)
        # A file that cannot be imported has an entry without a class. In others, a test may
        # belong to a class of the file.
        path = case.get("classname") or case.get("name") or ""
        of_file = next(of for module, of in modules.items() if f"{path}.".startswith(f"{module}."))
        # A test whose teardown fails has a second entry.
        if test not in of_file or outcome.status == "failed":
            of_file[test] = outcome
    return outcomes


def _outcome(case: ElementTree.Element) -> Outcome:
    for kind in ("failure", "error", "skipped"):
        if (element := case.find(kind)) is not None:
            message = element.get("message", "")
            reason = message.partition("\n")[0][:200]
            if kind == "skipped":
                return Outcome("skipped", reason)
            offline = _NO_DOWNLOAD.search(f"{message}\n{element.text}")
            return Outcome("not run" if offline else "failed", reason)
    return Outcome("passed")


def compare(
    pristine: Mapping[str, Outcome], overlaid: Mapping[str, Outcome]
) -> dict[str, tuple[Verdict, str]]:
    """Compare the outcomes of one file, test by test.

    Returns:
        Test to verdict, and the reason on the copy where the test did not pass.
    """
    verdicts = {}
    for test in {**pristine, **overlaid}:
        one, other = pristine.get(test, MISSING), overlaid.get(test, MISSING)
        statuses = {one.status, other.status}
        if statuses == {"passed"}:
            verdict = Verdict.BOTH
        elif one.status == "passed":
            verdict = Verdict.PRISTINE
        elif other.status == "passed":
            verdict = Verdict.OVERLAID
        elif statuses == {"skipped"}:
            verdict = Verdict.SKIPPED
        elif "not run" in statuses:
            verdict = Verdict.NOT_RUN
        else:
            verdict = Verdict.NEITHER
        verdicts[test] = verdict, (other.reason or one.reason)
    return verdicts
