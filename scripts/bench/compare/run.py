"""A run: the sides measured by turns, and its results written as they come."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from bench.compare import manifest
from bench.compare.installations import Installations, in_turn, installed, log_tail
from bench.compare.limit import Limit
from bench.compare.machine import command, describe, settings
from bench.compare.raw import recorded
from bench.compare.summary import AGAIN, STOCK, CaseResult, Child, summarise
from bench.errors import Failure
from bench.reports.markdown import markdown
from bench.reports.page import page
from bench.reports.run_file import replace

#: The sides of a GPU; "mrv2" is stock on Model Runner V2.
SIDES = (STOCK, "overlaid", "mrv2")
OVERLAID = SIDES[1]
#: For runs that compare outputs with stock's: fixes change them.
WITHOUT_FIXES = {"VLLM_READINESS": os.environ.get("VLLM_READINESS", "-fixes")}


@dataclass
class Table:
    """Cases that are measured together, and shown as one table.

    Attributes:
        sides: those that are measured.
        about: the table's title, and what else its JSON holds.
        cases: name to parameters.
        group: the process that measures it, with the other tables of the same group.
        baseline: see :func:`~bench.compare.summary.summarise`.
        children: the results so far.
    """

    sides: Sequence[str]
    about: dict[str, Any]
    cases: Mapping[str, Any]
    group: str
    baseline: str | None = None
    children: list[Child] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """One group of tables on one side in one round."""

    group: str
    side: str
    round: int

    @property
    def name(self) -> str:
        """Group, side and round."""
        return f"{self.group}, {self.side}, round {self.round}"


class Run(ABC):
    """A run.

    Attributes:
        args: the program's.
        tables: by name, in the order in which they are shown.
        environment: variables of every child.
        device: "CPU", or torch's name of the GPU, as soon as it is known.
    """

    environment: Mapping[str, str] = MappingProxyType({})
    device = "CPU"

    def __init__(
        self, args: argparse.Namespace, installations: Installations, tables: Mapping[str, Table]
    ) -> None:
        self.args, self.installations, self.tables = args, installations, tables
        self._started = time.monotonic()
        self._limit = Limit(getattr(args, "limit", None))
        self._errors: list[str] = []
        self._decided: dict[str, Any] = {}

    @abstractmethod
    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Return the results of a job, by table and case.

        Raises:
            Failure: a process failed.
        """

    def leave_out(self, job: Job) -> None:  # noqa: B027  (nothing to do, for most runs)
        """Take note that a job's round does not begin, nor any later one of its group."""

    def jobs(self) -> list[Job]:
        """Return the jobs in order: by rounds, and the sides by turns."""
        groups = {table.group: table.sides for table in self.tables.values()}
        return [
            Job(group, side, turn + 1)
            for turn in range(self.args.rounds)
            for group, sides in groups.items()
            for side in in_turn(turn, sides)
        ]

    def child(
        self,
        name: str,
        side: str,
        module: Sequence[str],
        environment: Mapping[str, str],
        timeout: float,
        paths: Sequence[Path] = (),
        watch: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Run a module, whose first argument is the file that it writes JSON to.

        Args:
            name: for its files.
            side: see :func:`origin`.
            module: its name, and its other arguments.
            environment: variables to set, besides the run's.
            timeout: in seconds.
            paths: further PYTHONPATH entries.
            watch: called about every second; ends the module if it raises.

        Raises:
            Failure: it failed, or took too long; its log is kept.
        """
        out = self.out(name)
        log = out.with_suffix(".log")
        arguments = ["-m", module[0], str(out), *module[1:]]
        variables = {**self.environment, **environment}
        code = self.installations.run(
            origin(side), arguments, log, timeout, variables, paths, watch=watch
        )
        if code != 0:
            kept = shutil.copy(log, self.args.out)
            raise Failure(f"{name} failed ({code}; log: {kept}):\n{log_tail(log)}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    def out(self, name: str) -> Path:
        """Return the file that a child of this name writes JSON to."""
        return self.installations.work / f"{name.replace(', ', '-').replace(' ', '-')}.json"

    def execute(self) -> int:
        """Measure, and write and print the results.

        Returns:
            0 if every job was done and the overlaid side returned the same as stock; 1 if not;
            130 after Ctrl-C.

        Raises:
            KeyboardInterrupt: before anything was measured.
        """
        complete = False
        self._decide()
        try:
            self._measure_all()
            complete = True
        except KeyboardInterrupt:
            if not self.measured():
                raise
            print("\nbench: stopped; what was measured is kept", file=sys.stderr)
        try:
            self.installations.check_untouched()
        except Failure as error:
            self._errors.append(str(error))
        result = self.write(complete)
        print(f"\n{markdown(result)}\nrun.json and run.md are in {self.args.out}", flush=True)
        try:
            replace(self.args.out / "run.html", page(result))
        except Failure as error:
            print(f"bench: {error}", file=sys.stderr)
        return int(bool(self._errors) or self.spoilt(result)) if complete else 130

    def _decide(self) -> None:
        """Write down what is going to be measured, before anything is."""
        if not self.tables:
            return
        rows = {
            name: {"sides": list(table.sides), "cases": list(table.cases)}
            for name, table in self.tables.items()
        }
        rounds, limit = self.args.rounds, getattr(self.args, "limit", None)
        decided = manifest.decide(command(), rounds, self.installations.digests, rows, limit)
        replace(self.args.out / manifest.NAME, json.dumps(decided, indent=1))
        self._decided = decided
        digest = manifest.digest(decided)
        print(f"bench: decided in {self.args.out / manifest.NAME}, sha256 {digest}", flush=True)

    def _measure_all(self) -> None:
        """Do every job; one that fails leaves an error behind."""
        with tqdm(self.jobs(), unit="engine", dynamic_ncols=True) as bar:
            for job in bar:
                bar.set_description(job.name)
                if not self._limit.allows(job.group, job.round):
                    self.leave_out(job)
                    continue
                try:
                    results = self.measure(job)
                except Failure as error:
                    self._errors.append(str(error))
                    bar.write(str(error), file=sys.stderr)
                    continue
                for name, cases in results.items():
                    self.tables[name].children.append(Child(job.side, job.round, cases))
                self.write(complete=False)

    def write(self, complete: bool) -> dict[str, Any]:
        """Write the results so far; return the run's JSON."""
        run = self.report(complete)
        replace(self.args.out / "run.json", json.dumps(run, indent=1))
        replace(self.args.out / "run.md", markdown(run))
        return run

    def report(self, complete: bool) -> dict[str, Any]:
        """Return the JSON of the results so far."""
        return {
            **describe(self._started, self.device, self.installations),
            "complete": complete,
            "environment": settings(self.environment),
            "manifest": self._decided,
            "rows": {
                name: table.about
                | summarise(table.cases, table.sides, table.children, table.baseline)
                | {
                    "baseline": table.baseline,
                    "children": [recorded(child) for child in table.children],
                }
                for name, table in self.tables.items()
                if table.children
            },
            "errors": self._errors,
        }

    def measured(self) -> bool:
        """Return whether there are any results."""
        return any(table.children for table in self.tables.values())

    def spoilt(self, result: Mapping[str, Any]) -> bool:
        """Return whether a problem refuses a ratio of the overlaid side."""
        return any(
            case["problems"].get(side)
            for row in result["rows"].values()
            for case in row["cases"].values()
            for side in SIDES[:2]
        )


def origin(side: str) -> str:
    """Return the installation that a side imports: Model Runner V2 is stock's."""
    return OVERLAID if side == OVERLAID else STOCK


def measured_sides(sides: Sequence[str], args: argparse.Namespace) -> tuple[str, ...]:
    """Return the sides that are asked for, with stock, and stock once more with ``--aa``."""
    asked = (STOCK, *getattr(args, "sides", sides))
    chosen = tuple(side for side in sides if side in asked)
    return (*chosen, AGAIN) if args.aa else chosen


def run(args: argparse.Namespace, make: Callable[[Installations], Run]) -> int:
    """Make a run with views of the installation that is named, and execute it.

    Returns:
        As :meth:`Run.execute`; 1 if there is no such installation.
    """
    try:
        with installed(args.site, args.python) as installations:
            return make(installations).execute()
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench: stopped; nothing was measured", file=sys.stderr)
        return 130
