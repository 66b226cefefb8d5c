"""The Grafana dashboard of docs, and its queries."""

import json
import re
from collections.abc import Iterator
from typing import Any

from support.sites import REPO

FILE = REPO / "docs" / "grafana-dashboard.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())


def expressions() -> Iterator[str]:
    """Yield each panel's queries, with Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        assert panel["targets"]
        for target in panel["targets"]:
            yield target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*")


def names(expression: str) -> set[str]:
    """Return the metrics of a query, as Prometheus's parser names them."""
    found = re.findall(r"vllm:readiness_\w+", expression)
    return {re.sub(r"_(total|sum|count|bucket)$", "", name) for name in found}
