"""The probe's figures on the /metrics of real servers: overlaid, and stock with a plugin.

Beside several servers this process writes known figures, as a worker would.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from demo import model
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from readiness.metrics import EXPORTED, METRICS, VALUES, write
from support import sites
from support.engine import Engine
from support.server import Server
from vllm.v1.readiness.engine import gauges

#: How a server gets the probe.
WAYS = ("overlaid", pytest.param("plugin", marks=pytest.mark.slow))
PLUGIN = sites.REPO / "scripts" / "probe" / "plugin"
PREFIX = "vllm:readiness_"
#: Some of vLLM's own metrics, by the names that dashboards use.
VLLMS = {
    *("vllm:num_requests_running", "vllm:generation_tokens", "vllm:inter_token_latency_seconds"),
    *("vllm:num_preemptions", "vllm:cache_config_info", "process_cpu_seconds"),
}


@pytest.fixture(scope="module")
def environments(folder: Path, stock: Engine, overlaid: Engine) -> dict[str, dict[str, str]]:
    """By way, the variables that a server runs with."""
    tests = sites.REPO / "tests"
    searched = {"overlaid": [overlaid.site, tests], "plugin": [stock.site, PLUGIN, tests]}
    return {
        way: {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, searched[way])),
            "VLLM_READINESS_PROBE": str(folder / f"probe of {way}"),
            "VLLM_READINESS_SLOTS": "0",  # penalties fall back
        }
        for way in searched
    }


class Probed(Server):
    """A server over a small generated model."""

    def __init__(self, folder: Path, way: str, engine: Engine, environment: dict[str, str]) -> None:
        drawn = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
        log, paths = folder / f"{way}.log", [PLUGIN] if way == "plugin" else []
        super().__init__(engine, log, folder / "served model", drawn, paths, environment)

    def metrics(self) -> dict[str, Metric]:
        """Return the metric families of /metrics, by name."""
        return by_name(self.ask("/metrics"))


Servers = Callable[[str], Probed]


@pytest.fixture(scope="module")
def servers(
    folder: Path, environments: dict[str, dict[str, str]], stock: Engine, overlaid: Engine
) -> Iterator[Servers]:
    """Return a way's server, which is started when it is first asked for."""
    model.write(folder / "served model", num_attention_heads=2, num_key_value_heads=1)
    started: dict[str, Probed] = {}

    def server(way: str) -> Probed:
        if way not in started:
            engine = overlaid if way == "overlaid" else stock
            started[way] = Probed(folder, way, engine, environments[way])
            started[way].wait()
            started[way].generate([11, 13, 17], max_tokens=3, presence_penalty=1.0)
        return started[way]

    try:
        yield server
    finally:
        for running in started.values():
            running.stop()


def by_name(page: str) -> dict[str, Metric]:
    """Return a page's metric families, each of which it has once."""
    families = list(text_string_to_metric_families(page))
    named = {family.name: family for family in families}
    assert len(named) == len(families)
    return named


def samples(family: Metric) -> dict[tuple[str, ...], float]:
    """Return values by the suffix of the sample's name and the labels' values."""
    return {
        (
            sample.name.removeprefix(family.name),
            *(sample.labels[key] for key in sorted(sample.labels)),
        ): sample.value
        for sample in family.samples
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_server_shows_what_its_own_steps_took(way: str, servers: Servers) -> None:
    """Three tokens took three steps; figures are written every two seconds."""
    metrics = ("execute_model", "sample_tokens", "output_interval", "schedule")
    server = servers(way)
    deadline = time.monotonic() + 60
    while True:
        page = server.metrics()
        steps, sampled, outputs, scheduled = (
            samples(page[f"{PREFIX}{name}_seconds"]) for name in metrics
        )
        if steps.get(("_count", "rank0"), 0) >= 3 and scheduled:
            break
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        time.sleep(0.5)
    assert steps["_count", "rank0"] == sampled["_count", "rank0"] == 3
    assert outputs["_count", "rank0"] == 2
    assert steps["_sum", "rank0"] > 0
    assert scheduled["_count", "engine0"] >= 3


def test_a_server_names_its_overlay_and_counts_fallbacks(servers: Servers) -> None:
    page = servers("overlaid").metrics()
    (info,) = page[f"{PREFIX}info"].samples
    assert info.labels["runner"] == "V1"
    assert info.labels["version"] == sites.OVERLAY.pin.overlay
    assert "penalties" in info.labels["on"].split(",")
    assert "seeds" in info.labels["off"].split(",")  # has no effect on a CPU
    fallbacks = samples(page[f"{PREFIX}fallbacks"])
    assert fallbacks["_total", "penalties", gauges.NO_SLOT] >= 3


@pytest.mark.parametrize("way", WAYS)
def test_vllms_own_metrics_are_still_there(way: str, servers: Servers) -> None:
    page = servers(way).metrics()
    ours = {name for name in page if name.startswith(PREFIX)}
    assert ours == METRICS | VALUES | (EXPORTED if way == "overlaid" else set())
    assert page.keys() >= VLLMS
    tokens = page["vllm:generation_tokens"].samples
    assert [s.value for s in tokens if s.name.endswith("_total")] == [3]


#: Makes the routes of one of several servers, and prints its page.
OF_SEVERAL = """
import vllm.plugins, vllm.v1.metrics.prometheus
if {early}:
    vllm.plugins.load_general_plugins()
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
vllm.plugins.load_general_plugins()
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import Counter
Counter("vllm:of_its_own", "A metric of vLLM's.").inc()
for _ in range(2):
    app = FastAPI()
    attach_router(app)
client = TestClient(app)
for path in ("/metrics", "/metrics/", "/metrics"):
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
print("\\n== " + answer.text, end="")
"""


@pytest.mark.parametrize(
    ("way", "early"),
    [
        ("overlaid", True),
        pytest.param("plugin", True, marks=pytest.mark.slow),
        pytest.param("plugin", False, marks=pytest.mark.slow),
    ],
)
def test_each_of_several_servers_shows_the_same(
    way: str, early: bool, environments: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    """With --api-server-count, where the route of /metrics makes a registry a scrape."""
    environment = environments[way]
    counted = write(Path(environment["VLLM_READINESS_PROBE"]), "rank3", (1, 5_000, 0))
    program = OF_SEVERAL.format(early=early)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**environment, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    page = by_name(done.stdout.rpartition("\n== ")[2])
    assert samples(page["vllm:of_its_own"])[("_total",)] == 1
    values = samples(page[f"{PREFIX}sample_tokens_seconds"])
    assert values["_count", "rank3"] == values["_bucket", "5e-06", "rank3"] == 1
    counted.remove()
