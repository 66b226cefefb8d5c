"""Outcomes of upstream's tests, and the selection of its test files."""

from pathlib import Path

import pytest
from conformance import outcomes, selection
from conformance.comparison import Result
from conformance.outcomes import Outcome, Verdict
from overlay.errors import OverlayError
from support.sites import OVERLAY

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.test_x" name="test_passes" />
<testcase classname="tests.test_x" name="test_fails[0.5]"><failure message="assert 1 == 2&#10;more">
x.py:3: AssertionError</failure></testcase>
<testcase classname="tests.test_x" name="test_skips"><skipped message="no GPU" /></testcase>
<testcase classname="tests.test_x" name="test_loads"><error message="failed on setup">
OSError: We couldn't connect to 'https://huggingface.co' to load the files</error></testcase>
<testcase classname="tests.test_x" name="test_configures"><failure message="1 validation error">
E  Value error, Invalid repository ID or local directory specified: 'facebook/opt-125m'.</failure>
</testcase>
<testcase classname="tests.test_x.TestClass" name="test_ends_badly" />
<testcase classname="tests.test_x.TestClass" name="test_ends_badly"><error message="teardown" />
</testcase><testcase classname="" name="tests.test_xy"><error message="collection failure" />
</testcase>
</testsuite></testsuites>
"""
PASSED, FAILED = Outcome("passed"), Outcome("failed", "assert 1 == 2")
SKIPPED, NOT_RUN = Outcome("skipped", "no GPU"), Outcome("not run", "failed on setup")


def test_outcomes_are_read_by_file_and_test(tmp_path: Path) -> None:
    report, files = tmp_path / "report.xml", ["tests/test_x.py", "tests/test_xy.py"]
    assert outcomes.read(report, files) == {file: {} for file in files}
    report.write_text(REPORT)
    assert outcomes.read(report, files) == {
        "tests/test_x.py": {
            "tests.test_x::test_passes": PASSED,
            "tests.test_x::test_fails[0.5]": FAILED,
            "tests.test_x::test_skips": SKIPPED,
            "tests.test_x::test_loads": NOT_RUN,
            "tests.test_x::test_configures": Outcome("not run", "1 validation error"),
            "tests.test_x.TestClass::test_ends_badly": Outcome("failed", "teardown"),
        },
        "tests/test_xy.py": {"::tests.test_xy": Outcome("failed", "collection failure")},
    }


@pytest.mark.parametrize(
    ("pristine", "overlaid", "verdict"),
    [
        (PASSED, PASSED, Verdict.BOTH),
        (FAILED, FAILED, Verdict.NEITHER),
        (SKIPPED, SKIPPED, Verdict.SKIPPED),
        (SKIPPED, FAILED, Verdict.NEITHER),
        (NOT_RUN, NOT_RUN, Verdict.NOT_RUN),
        (NOT_RUN, FAILED, Verdict.NOT_RUN),
        (None, FAILED, Verdict.NEITHER),
        *((PASSED, other, Verdict.PRISTINE) for other in (FAILED, SKIPPED, NOT_RUN, None)),
        *((other, PASSED, Verdict.OVERLAID) for other in (FAILED, SKIPPED, NOT_RUN, None)),
    ],
)
def test_a_test_that_passes_on_one_copy_alone_is_no_match(
    pristine: Outcome | None, overlaid: Outcome | None, verdict: Verdict
) -> None:
    """None: that copy's process ended before the test."""
    copies = ({"test": each} if each else {} for each in (pristine, overlaid))
    verdicts = outcomes.compare(*copies)
    assert [given for given, _ in verdicts.values()] == [verdict]
    result = Result("vllm 0.22.0", {"tests/test_x.py": verdicts}, ["tests/a.py is not there"])
    assert bool(result.regressions) == (verdict is Verdict.PRISTINE)
    assert result.counts("tests/test_x.py") == {verdict: 1}
    named = verdict in (Verdict.PRISTINE, Verdict.OVERLAID, Verdict.NOT_RUN)
    assert (f"{verdict.value}: test: " in result.table()) == named
    assert "note: tests/a.py is not there" in result.table()


def test_a_file_that_nobody_has_decided_on_is_refused(tmp_path: Path) -> None:
    listed = (*selection.EVERYWHERE, *selection.ON_A_GPU, *selection.LEFT_OUT)
    assert len(set(listed)) == len(listed)
    for name in listed:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("from vllm.v1.sample import sampler\n")
    selection.check(tmp_path, OVERLAY.targets)
    assert selection.differences(tmp_path, OVERLAY.targets) == (set(), set())
    new = tmp_path / "tests/v1/test_new.py"
    new.write_text("import vllm.v1.outputs\n")
    selection.check(tmp_path, OVERLAY.targets)
    for line in ("import vllm.plugins", "from vllm.v1.worker import gpu_input_batch"):
        new.write_text(f"def test() -> None:\n    {line}\n")
        with pytest.raises(OverlayError, match="test_new"):
            selection.check(tmp_path, OVERLAY.targets)
    (tmp_path / selection.EVERYWHERE[0]).unlink()
    # Of another release these are told, and no reason to run nothing.
    unlisted, missing = selection.differences(tmp_path, OVERLAY.targets)
    assert (unlisted, missing) == ({"tests/v1/test_new.py"}, {selection.EVERYWHERE[0]})
    new.unlink()
    with pytest.raises(OverlayError, match="do not exist"):
        selection.check(tmp_path, OVERLAY.targets)
