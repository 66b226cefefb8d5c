"""A run: jobs one after the other, and slices written as they come."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.errors import Failure, Fatal
from bench.harness import manifest
from bench.harness.files import replace
from bench.harness.installations import Installations, installed
from bench.harness.machine import SCHEMA, command, describe, settings
from bench.results.markdown import markdown
from bench.results.run_file import save
from bench.results.slices import Group, Slice, found_in, has_ratio


class Job(NamedTuple):
    """A round of a start."""

    name: str
    round: int

    def __str__(self) -> str:
        """Return the name and the round."""
        return f"{self.name}, round {self.round}"


class Run(ABC):
    """A run.

    Attributes:
        args: of the program.
        installations: stock and overlaid.
        slices: measured so far.
        environment: variables of every child.
        device: "CPU", or torch's name of the GPU, once it is known.
        title: a sentence for the report.
        groups: to be measured.
        running: ends what jobs have left running.
    """

    environment: Mapping[str, str] = MappingProxyType({})
    device = "CPU"
    title = ""
    groups: Sequence[Group] = ()

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        self.args, self.installations = args, installations
        self.slices: list[Slice] = []
        self.running = contextlib.ExitStack()
        self._started = time.monotonic()
        self._lengths: dict[str, float] = {}
        #: When the running job began to measure, and the seconds that the last start took.
        self._began, self._starting = 0.0, 0.0
        self._errors: list[str] = []
        self._decided: dict[str, Any] = {}

    @abstractmethod
    def jobs(self) -> list[Job]:
        """Return the jobs in order."""

    @abstractmethod
    def measure(self, job: Job) -> None:
        """Do a job, and :meth:`keep` its slices.

        Raises:
            Failure: a process failed.
        """

    def keep(self, one: Mapping[str, Any]) -> None:
        """Keep a slice, and write and print it."""
        found = found_in(one["figures"])
        whole = {**one, "problems": [*one.get("problems", ()), *found]}
        self.slices.append(whole)
        self.write(complete=False)
        first, second = (one["figures"][side] for side in one["sides"])
        name = next((each for each in first if each in second and has_ratio(each)), None)
        shown = f"{name} {first[name]:,.4g} / {second[name]:,.4g}" if name else ""
        about = f"{one['engine']}, {one['case']}, {'/'.join(one['sides'])}, round {one['round']}"
        spent = time.monotonic() - self._started
        print("; ".join([f"{spent:.0f} s, {about}: {shown}", *whole["problems"]]), flush=True)

    def execute(self) -> int:
        """Measure, and write and print the results.

        Returns:
            0 if every job was done and no slice has a problem; 1 if not; 130 after Ctrl-C.

        Raises:
            KeyboardInterrupt: before anything was measured.
        """
        complete = False
        self._decide()
        try:
            with self.running:
                self._measure_all()
            complete = True
        except KeyboardInterrupt:
            if not self.slices:
                raise
            print("\nbench: stopped; the slices so far are kept", file=sys.stderr)
        try:
            self.installations.check_untouched()
        except Failure as error:
            self._errors.append(str(error))
        run = self.write(complete)
        print(f"\n{markdown(run)}\nrun.json and run.md are in {self.args.out}", flush=True)
        if not complete:
            return 130
        return int(bool(self._errors) or any(one["problems"] for one in self.slices))

    def _decide(self) -> None:
        """Write the manifest."""
        limit = getattr(self.args, "limit", None)
        digests = self.installations.digests
        decided = manifest.decide(command(), self.args.rounds, digests, self.groups, limit)
        replace(self.args.out / manifest.NAME, json.dumps(decided, indent=1).encode())
        self._decided = decided
        digest = manifest.digest(decided)
        print(f"bench: decided in {self.args.out / manifest.NAME}, sha256 {digest}", flush=True)

    def _measure_all(self) -> None:
        """Do every job that ends in time; a job that fails leaves an error behind.

        After a :class:`Fatal` error no job is done.
        """
        for job in self.jobs():
            self._began = time.monotonic()
            if not self._fits(job, self._began - self._started):
                print(f"bench: {job} would end too late", file=sys.stderr, flush=True)
                continue
            try:
                self.measure(job)
            except Failure as error:
                self._errors.append(str(error))
                print(error, file=sys.stderr, flush=True)
                if isinstance(error, Fatal):
                    return
            self._lengths[job.name] = time.monotonic() - self._began

    def started(self) -> None:
        """Note that processes have started that stay for the next jobs of the same name."""
        now = time.monotonic()
        self._starting, self._began = now - self._began, now

    def _fits(self, job: Job, spent: float) -> bool:
        """Return whether a job ends within the limit, by the length of earlier jobs."""
        limit = getattr(self.args, "limit", None)
        usual = self._starting + max(self._lengths.values(), default=0.0)
        return limit is None or spent + self._lengths.get(job.name, usual) <= limit

    def write(self, complete: bool) -> dict[str, Any]:
        """Write the results so far; return the run's JSON."""
        run = {
            "schema": SCHEMA,
            **describe(self._started, self.device, self.installations),
            "complete": complete,
            "environment": settings(self.environment),
            "manifest": self._decided,
            "title": self.title,
            "slices": self.slices,
            "problems": list(self._errors),
        }
        save(self.args.out / "run.json", run)
        replace(self.args.out / "run.md", markdown(run).encode())
        return run


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
