"""Engines of two ranks on two GPUs: those that run the same serve, others do not start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine import ranked
from engine.ranked import DIFFERENT
from gpu.kinds import ENVIRONMENT
from support.asynchronous import announce
from support.engine import Engine, Run
from support.sites import REPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PROGRAM = REPO / "tests" / "engine" / "ranked.py"
CHANGES: dict[str, Callable[[], None] | None] = {
    "same": None,
    "switch": ranked.other_switch,
    "digest": ranked.other_digest,
    "pristine": ranked.pristine,
}


@pytest.fixture(scope="module")
def runs(
    engines: dict[str, Engine], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Run]]:
    """One engine for each change of the second rank, all at once: most of their time is imports."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    running = {}
    for name, change in CHANGES.items():
        plugins = announce(folder / name, *filter(None, [change]))
        environment = {**ENVIRONMENT, "VLLM_READINESS": "on", "NCCL_NVLS_ENABLE": "0"}
        running[name] = engines["overlaid"].start(PROGRAM, paths=[plugins], environment=environment)
    yield running
    for each in running.values():
        each.wait()


def test_ranks_that_run_the_same_serve(runs: dict[str, Run]) -> None:
    assert all(len(tokens) == 8 for tokens in runs["same"].finish())
    assert "Readiness overlay " in runs["same"].text()
    assert DIFFERENT not in runs["same"].text()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("switch", "differs from rank 0 (off: penalties). On that host: export VLLM_READINESS=on"),
        ("digest", "files differ from rank 0. With rank 0's copy of the overlay"),
        ("pristine", "rank 1: no answer. It runs vLLM without the overlay"),
    ],
)
def test_ranks_that_differ_do_not_start(runs: dict[str, Run], name: str, sentence: str) -> None:
    assert runs[name].wait() != 0
    assert DIFFERENT in runs[name].text()
    assert sentence in runs[name].text()
