"""The Grafana dashboard, without Grafana, which no index or package list here has.

Grafana's own SDK reads it, and writes it again without loss: no field is unknown. Prometheus's own
tool reads the queries in test_alerts.py.
"""

import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from readiness.metrics import EXPORTED, METRICS, VALUES
from support.dashboard import DASHBOARD, expressions, names


def leaves(value: Any, *path: object) -> Iterator[tuple[Any, ...]]:
    """Yield where each value is, and the value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, *path, key)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from leaves(each, *path, number)
    else:
        yield (*path, value)


def test_grafanas_own_types_lose_nothing() -> None:
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(DASHBOARD)))
    assert set(leaves(DASHBOARD)) <= set(leaves(again))


def test_every_metric_of_ours_is_shown_and_no_other_is_asked_for() -> None:
    ours = METRICS | VALUES | EXPORTED
    asked = set().union(*map(names, expressions()))
    assert asked == ours
