"""Runs whose rounds make one table of their own, in place of cases on sides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from bench.compare.machine import describe, settings
from bench.compare.run import Run
from bench.reports.markdown import CUT_OFF


class TableRun(Run):
    """A run of rounds, and the table that they make.

    Attributes:
        columns: the table's.
        texts: how many of them, the first ones, hold text.
        rounds: what has been measured, as run.json keeps it.
    """

    columns: ClassVar[Sequence[str]]
    texts: ClassVar[int]
    rounds: Collection[Any]

    @abstractmethod
    def table(self) -> Mapping[str, Any]:
        """Return the "title", "note" and "rows" of the table, and the "problems"."""

    def report(self, complete: bool) -> dict[str, Any]:
        """Return the run's JSON, a table."""
        table = self.table()
        align = ["l"] * self.texts + ["r"] * (len(self.columns) - self.texts)
        return {
            **describe(self._started, self.device, self.installations),
            "kind": "table",
            "complete": complete,
            "environment": settings(self.environment),
            "title": table["title"],
            "note": table["note"] + f" {CUT_OFF}" * (not complete),
            "columns": list(self.columns),
            "align": align,
            "rows": table["rows"],
            "rounds": self.rounds,
            "problems": [*self._errors, *table["problems"]],
        }

    def measured(self) -> bool:
        """Return whether anything was measured."""
        return bool(self.rounds)

    def spoilt(self, result: Mapping[str, Any]) -> bool:
        """Return whether there is a problem."""
        return bool(result["problems"])
