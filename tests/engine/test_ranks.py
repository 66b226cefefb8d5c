"""Engines of two ranks on the CPU that differ: they do not start, unless that is to be a warning.

The ranks of one machine share an installation; a plugin changes the environment of the second one.
Two nodes, here of one machine, have an installation each.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from engine import ranked
from engine.ranked import DIFFERENT
from support import forked
from support.asynchronous import announce
from support.engine import Engine, PreloadedEngine, Run
from support.sites import REPO

pytestmark = pytest.mark.slow

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


def test_ranks_with_other_switches_do_not_start(run: Callable[..., Run]) -> None:
    refused = run(ranked.other_switch)
    assert refused.wait() != 0
    assert DIFFERENT in refused.text()
    sentence = "differs from rank 0 (off: penalties). On that host: unset VLLM_READINESS"
    assert sentence in refused.text()


def test_warn_serves_with_a_rank_that_differs(run: Callable[..., Run]) -> None:
    warned = run(ranked.other_switch, VLLM_READINESS_RANKS="warn")
    assert all(len(tokens) == 8 for tokens in warned.finish())
    assert "differs from rank 0 (off: penalties)" in warned.text()
    assert "Unknown vLLM environment variable" not in warned.text()


def refused_by(first: Engine, second: Engine) -> tuple[Run, Run]:
    """Start an engine on two nodes, each with an installation, as on two machines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    hasty = announce(first.folder / "ranks hasty", ranked.hasty)
    environment = {**forked.ENVIRONMENT, "VLLM_HOST_IP": "127.0.0.1"}
    runs = (
        first.start(PROGRAM, ["0", port], [hasty], environment),
        second.start(PROGRAM, ["1", port], environment=environment),
    )
    assert all(node.wait() != 0 for node in runs)
    assert DIFFERENT in runs[0].text()
    return runs


def test_a_node_with_upstream_s_vllm_is_found(
    overlaid: PreloadedEngine, stock: PreloadedEngine
) -> None:
    first, second = refused_by(overlaid, stock)
    assert "rank 1: no answer. It runs vLLM without the overlay" in first.text()
    assert "Readiness overlay" not in second.text()
