"""The alerts on the overlay's metrics and the dashboard's queries, judged by Prometheus's tool."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from environment.programs import PROMETHEUS
from support.dashboard import expressions
from support.sites import REPO

RULES = REPO / "docs" / "prometheus-alerts.yml"
ALERTS = [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]]
PREFIX = "vllm:readiness_"
STEPS = f'{PREFIX}execute_model_seconds_count{{instance="a",process="rank0"}}'


def fallbacks(reason: str) -> str:
    labels = f'instance="a",feature="penalties",reason="{reason}"'
    return f"{PREFIX}fallbacks_total{{{labels}}}"


def fences(owner: str) -> str:
    labels = f'instance="a",process="rank0",owner="{owner}"'
    return f"{PREFIX}fence_seconds_count{{{labels}}}"


PINNED = f'{PREFIX}pinned_bytes{{instance="a",process="rank0",owner="readback"}}'


def info(instance: str, digest: str, job: str = "vllm") -> str:
    labels = f'instance="{instance}",job="{job}",digest="{digest}",runner="V1"'
    return f"{PREFIX}info{{{labels}}}"


TOKENS = 'vllm:generation_tokens_total{instance="a"}'

#: Alert to series and their values at each minute: those that raise it.
RAISING: dict[str, dict[str, str]] = {
    "ReadinessFallback": {fallbacks("more requests than slots"): "0+100x60"},
    "ReadinessClassNotRecognised": {fallbacks("another class"): "1x60"},
    "ReadinessEarlyWaits": {STEPS: "0+1000x60", fences("penalties"): "0+600x60"},
    "ReadinessPinnedMemory": {PINNED: f"{3 << 30}x60"},
    "ReadinessGone": {TOKENS: "0+1000x60"},
    "ReadinessMixedDigests": {info("a", "one"): "1x60", info("b", "two"): "1x60"},
}
#: Series that raise none.
QUIET = {
    info("a", "one"): "1x60",
    info("b", "one"): "1x60",
    info("c", "two", job="canary"): "1x60",
    STEPS: "0+1000x60",
    TOKENS: "0+1000x60",
    PINNED: f"{1 << 30}x60",
    fences("output"): "0+1000x60",
    fences("penalties"): "0+400x60",
    fallbacks("more requests than slots"): "7x60",
}


def raised(folder: Path, series: dict[str, str], wanted: set[str]) -> None:
    """Let promtool check that these series raise these alerts after an hour, and no others."""
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": each} for name, each in series.items()],
            "promql_expr_test": [
                {
                    "expr": "count by (alertname) (ALERTS{alertstate='firing'})",
                    "eval_time": "50m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(wanted)
                    ],
                }
            ],
        }
    ]
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    promtool(folder, "test", "rules", file)


def promtool(folder: Path, *arguments: Any) -> None:
    tool = Path(PROMETHEUS.ensure()).with_name("promtool")
    done = subprocess.run(
        [tool, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_test_and_says_what_to_do(tmp_path: Path) -> None:
    assert list(RAISING) == ALERTS
    promtool(tmp_path, "check", "rules", RULES)
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        assert rule["annotations"].keys() == {"summary", "description"}


def test_prometheus_can_read_the_dashboards_queries(tmp_path: Path) -> None:
    rules = [{"record": "panel", "expr": expression} for expression in expressions()]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool(tmp_path, "check", "rules", "--lint=none", file)


@pytest.mark.parametrize("name", RAISING)
def test_an_alert_is_raised_by_what_it_is_for(name: str, tmp_path: Path) -> None:
    raised(tmp_path, RAISING[name], {name})


def test_ordinary_traffic_raises_none(tmp_path: Path) -> None:
    raised(tmp_path, QUIET, set())
