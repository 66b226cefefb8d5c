"""The probe in real engines: it counts every step and token, names waits, and changes no token.

The engines are overlaid ones on the CPU: with the engine's core in a process of its own, and
scheduled asynchronously on a simulated device. Each writes its metrics to a file when it stops.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from engine.probed import LENGTH, REQUESTS
from probe import report
from prometheus_client.parser import text_string_to_metric_families
from support import asynchronous
from support.engine import PreloadedEngine, at_once
from support.sites import REPO

pytestmark = pytest.mark.slow

PROGRAM = REPO / "tests" / "engine" / "probed.py"
SUFFIX = "_seconds_count"


class Run(NamedTuple):
    """A run: its tokens, the client's steps, the log, the file, and its counts.

    Counts are by histogram, process, and owner or part.
    """

    tokens: list[list[int]]
    steps: int
    log: str
    page: str
    counts: dict[tuple[str, str, str], float]


def counts(page: str) -> dict[tuple[str, str, str], float]:
    return {
        (
            sample.name.removeprefix("vllm:readiness_").removesuffix(SUFFIX),
            sample.labels["process"],
            sample.labels.get("owner", ""),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("vllm:readiness_")
        and sample.name.endswith((SUFFIX, "tokens_total"))
    }


@pytest.fixture(scope="module")
def runs(folder: Path, overlaid: PreloadedEngine) -> dict[str, Run]:
    """Return all runs, by how they run."""
    device = asynchronous.announce(folder / "device", asynchronous.register)

    def result(name: str) -> Run:
        file = folder / f"{name}.metrics"
        environment = {} if name.startswith("off") else {"VLLM_READINESS_PROBE": str(file)}
        if name == "apart":
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        late = name.endswith("asynchronous")
        run = overlaid.start(PROGRAM, ["asynchronous"] * late, [device] * late, environment)
        output = run.finish()
        page = file.read_text() if environment else ""
        return Run(output["tokens"], output["steps"], run.text(), page, counts(page))

    names = ["off", "apart", "off, asynchronous", "asynchronous"]
    with ThreadPoolExecutor(max_workers=at_once()) as pool:
        return dict(zip(names, pool.map(result, names), strict=True))


@pytest.mark.parametrize("name", ["apart", "asynchronous"])
def test_every_step_and_token_is_counted(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.steps > 40
    for kind in ("execute_model", "sample_tokens"):
        assert run.counts[kind, "rank0", ""] == run.steps
    assert run.counts["output_interval", "rank0", ""] == run.steps - 1
    for kind in ("schedule", "update_from_output"):
        # Asynchronously, one more may have been scheduled, for requests that had ended.
        assert 0 <= run.counts[kind, "engine0", ""] - run.steps <= 2
    assert run.counts["tokens_total", "engine0", ""] >= REQUESTS * LENGTH
    table = report.text(run.page)
    assert "rank0" in table
    assert "tokens/s" in table


def test_waits_are_named_by_their_owner(runs: dict[str, Run]) -> None:
    late = runs["asynchronous"].counts
    assert late["get_output", "rank0", ""] >= runs["asynchronous"].steps
    owners = {owner for name, _, owner in late if name == "fence"}
    assert "output" in owners
    assert not {"get_output", "update_async_output_token_ids"} & owners


def test_tokens_are_those_without_the_probe(runs: dict[str, Run]) -> None:
    assert runs["apart"].tokens == runs["off"].tokens
    assert runs["asynchronous"].tokens == runs["off, asynchronous"].tokens
    assert len({tuple(tokens) for tokens in runs["off"].tokens}) > 1
    for run in runs.values():
        assert "Unknown vLLM environment variable" not in run.log
