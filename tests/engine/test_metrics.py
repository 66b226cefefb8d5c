"""The probe's figures on the /metrics of a real overlaid server.

Beside several servers this process counts, as a worker would.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo import model
from probe import report
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from readiness.metrics import EXPORTED, METRICS, VALUES
from support import sites
from support.engine import Engine
from support.server import Server
from vllm.v1.readiness.engine import gauges, switch
from vllm.v1.readiness.watch import exports
from vllm.v1.readiness.watch.probe import histograms

PREFIX = "vllm:readiness_"
#: Some of vLLM's own metrics, by the names that dashboards use.
VLLMS = {
    *("vllm:num_requests_running", "vllm:generation_tokens", "vllm:inter_token_latency_seconds"),
    *("vllm:num_preemptions", "vllm:cache_config_info", "process_cpu_seconds"),
}


class Probed(Server):
    """A server over a small generated model."""

    def metrics(self) -> dict[str, Metric]:
        """Return the metric families of /metrics, by name."""
        return by_name(self.ask("/metrics"))


@pytest.fixture(scope="module")
def environment(overlaid: Engine) -> dict[str, str]:
    """The variables that a server runs with."""
    searched = (overlaid.site, sites.REPO / "tests")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, searched)),
        "VLLM_READINESS_PROBE": "1",
        "VLLM_READINESS_SLOTS": "0",  # penalties fall back
    }


@pytest.fixture(scope="module")
def server(folder: Path, environment: dict[str, str], overlaid: Engine) -> Iterator[Probed]:
    """A server that has generated three tokens."""
    model.write(folder / "served model", num_attention_heads=2, num_key_value_heads=1)
    drawn = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager"]
    log = folder / "probed.log"
    running = Probed(overlaid, log, folder / "served model", drawn, [], environment)
    try:
        running.wait()
        running.generate([11, 13, 17], max_tokens=3, presence_penalty=1.0)
        yield running
    finally:
        running.stop()


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which this process exports."""
    folder = tmp_path / "exports"
    folder.mkdir()
    monkeypatch.setenv(switch.EXPORTS, str(folder))
    monkeypatch.setattr(exports, "_exports", exports.Exports())
    histograms.clear()
    return folder


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


def test_a_server_shows_what_its_own_steps_took(server: Probed) -> None:
    """Three tokens took three steps."""
    page = server.metrics()
    metrics = ("execute_model", "sample_tokens", "output_interval", "schedule")
    steps, sampled, outputs, scheduled = (
        samples(page[f"{PREFIX}{name}_seconds"]) for name in metrics
    )
    assert steps["_count", "rank0"] == sampled["_count", "rank0"] == 3
    assert outputs["_count", "rank0"] == 2
    assert steps["_sum", "rank0"] > 0
    assert scheduled["_count", "engine0"] >= 3
    assert samples(page[f"{PREFIX}tokens"])["_total", "engine0"] == 3
    assert "tokens/s" in report.text(server.ask("/metrics"))


def test_a_server_names_its_overlay_and_counts_fallbacks(server: Probed) -> None:
    page = server.metrics()
    (info,) = page[f"{PREFIX}info"].samples
    assert info.labels["runner"] == "V1"
    assert info.labels["version"] == sites.OVERLAY.pin.overlay
    assert "penalties" in info.labels["on"].split(",")
    assert "seeds" in info.labels["off"].split(",")  # has no effect on a CPU
    fallbacks = samples(page[f"{PREFIX}fallbacks"])
    assert fallbacks["_total", "penalties", gauges.NO_SLOT] >= 3


def test_vllms_own_metrics_are_still_there(server: Probed) -> None:
    page = server.metrics()
    ours = {name for name in page if name.startswith(PREFIX)}
    assert ours == METRICS | VALUES | EXPORTED
    assert page.keys() >= VLLMS
    tokens = page["vllm:generation_tokens"].samples
    assert [s.value for s in tokens if s.name.endswith("_total")] == [3]


#: Makes the routes of one of several servers, and prints its page.
OF_SEVERAL = """
import vllm.plugins
vllm.plugins.load_general_plugins()
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
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


def test_each_of_several_servers_shows_the_same(
    environment: dict[str, str], tmp_path: Path, exported: Path
) -> None:
    """With --api-server-count, where the route of /metrics makes a registry a scrape."""
    histograms.observe("sample_tokens", 5_000, "rank3")
    done = subprocess.run(
        [sys.executable, "-c", OF_SEVERAL],
        capture_output=True,
        text=True,
        check=False,
        env={
            **environment,
            "VLLM_READINESS_EXPORTS": str(exported),
            "PROMETHEUS_MULTIPROC_DIR": str(tmp_path),
        },
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    page = by_name(done.stdout.rpartition("\n== ")[2])
    assert samples(page["vllm:of_its_own"])[("_total",)] == 1
    values = samples(page[f"{PREFIX}sample_tokens_seconds"])
    assert values["_count", "rank3"] == values["_bucket", "5e-06", "rank3"] == 1
