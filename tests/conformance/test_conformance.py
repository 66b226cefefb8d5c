"""Upstream's own tests pass on an overlaid installation wherever they pass on a pristine one."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.harness.installations import Installations
from conformance import archive, comparison, selection
from conformance.outcomes import Verdict
from overlay.installation import locate
from support.sites import OVERLAY, REPO, UPSTREAM

pytestmark = pytest.mark.slow

FOLDER = REPO / "build" / "conformance"
INPUT_BATCH = "vllm/v1/worker/gpu_input_batch.py"
NO_SWAP = """

InputBatch.swap_states = lambda *_: None
"""
TEST = "tests/v1/worker/test_gpu_input_batch.py"
#: Takes six minutes of a core on either copy; `make conformance` runs it.
LONG = "tests/v1/logits_processors/test_correctness.py"


@pytest.fixture(scope="module")
def source() -> Path:
    return archive.obtain(OVERLAY.pin, FOLDER)


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory beside the shared environment, so that its files can be linked to."""
    folder = Path(tempfile.mkdtemp(prefix="conformance-", dir=REPO / "build"))
    yield folder
    shutil.rmtree(folder)


def test_every_test_that_passes_on_stock_passes_on_the_overlay(source: Path) -> None:
    files = [file for file in selection.EVERYWHERE if file != LONG]
    result = comparison.run(locate(python=sys.executable), FOLDER, source, files)
    assert not result.regressions, result.table()
    assert not result.tests(Verdict.OVERLAID), result.table()
    assert len(result.tests(Verdict.BOTH)) > 100


def test_a_fault_in_a_patched_module_is_reported(source: Path, work: Path) -> None:
    sides = Installations(UPSTREAM, work, sys.executable)
    module = sides.views["overlaid"] / INPUT_BATCH
    text = module.read_text()
    module.unlink()  # a link must not lead the fault into the shared environment
    module.write_text(text.replace("    def swap_states(", "    def swap(", 1) + NO_SWAP)
    verdicts = comparison.compare(sides, source, [TEST], work)[TEST]
    failing = [test for test, (given, _) in verdicts.items() if given is Verdict.PRISTINE]
    assert any("test_swap_states_in_input_batch" in test for test in failing)
