"""Engines of two ranks on the CPU: those that run the same serve, others do not start.

The ranks share one installation; a plugin changes what the second one sees of it.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from engine import ranked
from support import forked
from support.asynchronous import announce
from support.engine import PreloadedEngine, Run
from support.sites import REPO

PROGRAM = REPO / "tests" / "engine" / "ranked.py"


@pytest.fixture
def run(folder: Path, overlaid: PreloadedEngine) -> Callable[..., Run]:
    """Start an engine whose second rank a plugin changes."""

    def run(change: Callable[[], None] | None, **environment: str) -> Run:
        # Of folders of one name only the first counts, and the launcher has one of forks.
        plugins = announce(folder / f"ranks {change and change.__name__}", *filter(None, [change]))
        return overlaid.start(
            PROGRAM, paths=[plugins], environment={**forked.ENVIRONMENT, **environment}
        )

    return run


def test_ranks_that_run_the_same_serve(run: Callable[..., Run]) -> None:
    served = run(None)
    assert all(len(tokens) == 8 for tokens in served.finish())
    assert "Readiness overlay: " not in served.text()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (ranked.other_switch, "not as on rank 0 (off: penalties). There: unset VLLM_READINESS"),
        (ranked.other_digest, "other files than rank 0. With the copy of the overlay that rank 0"),
        (ranked.pristine, "rank 1: no answer. It runs vLLM without the overlay"),
    ],
    ids=["switch", "digest", "pristine"],
)
def test_ranks_that_differ_do_not_start(
    run: Callable[..., Run], change: Callable[[], None], sentence: str
) -> None:
    refused = run(change)
    assert refused.wait() != 0
    assert "the ranks of this engine do not run the same" in refused.text()
    assert sentence in refused.text()


def test_warn_serves_with_a_rank_that_differs(run: Callable[..., Run]) -> None:
    warned = run(ranked.other_switch, VLLM_READINESS_RANKS="warn")
    assert all(len(tokens) == 8 for tokens in warned.finish())
    assert "not as on rank 0 (off: penalties)" in warned.text()
    assert "Unknown vLLM environment variable" not in warned.text()
