"""What each child returned, as a run's JSON keeps it: enough to sum the run up again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from bench.compare import outputs
from bench.compare.summary import CaseResult, Child

#: Fields of a case's result that are kept as they are; of its outputs, digests are.
_KEPT = tuple(field.name for field in fields(CaseResult) if field.name != "outputs")


def recorded(child: Child) -> dict[str, Any]:
    """Return the JSON of a child."""
    cases = {
        name: {
            **{field: getattr(result, field) for field in _KEPT},
            "digests": {kind: outputs.digest(packed) for kind, packed in result.outputs.items()},
        }
        for name, result in child.cases.items()
    }
    return {"side": child.side, "round": child.round, "cases": cases}


def restored(children: Sequence[Mapping[str, Any]]) -> list[Child]:
    """Return the children of a row's JSON; digests stand for their outputs."""
    return [
        Child(
            child["side"],
            child["round"],
            {
                name: CaseResult(outputs=case["digests"], **{field: case[field] for field in _KEPT})
                for name, case in child["cases"].items()
            },
        )
        for child in children
    ]
