"""Runs of pairs: two sides at a time, which exchange places.

With two GPUs both sides run at the same time, each with a GPU and half of the cores, and then
exchange places: each side has an engine in both places. With one GPU they take turns, in both
orders. Engines stay started through all rounds of their pair.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.errors import Failure
from bench.harness.command_line import PEER
from bench.harness.installations import ROOT, Installations, end, installed
from bench.harness.kept import Kept
from bench.markdown import markdown
from bench.run import BUSY, Run, Slice, replace, save

#: Seconds for an engine to start, for a slice to end beyond its own time, and for an engine to end.
#: A hybrid model's kernels compile for minutes.
_START, _SLICE, _END = 400.0, 240.0, 30.0
#: Prefixes of the variables that influence a measurement.
_SETTINGS = (
    *("VLLM_", "CUDA_", "OMP_", "TORCH", "PYTORCH_", "NCCL_", "CUBLAS_", "TRITON_"),
    *("MKL_", "KMP_", "GOMP_", "MALLOC_", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONMALLOC"),
)
_LINES = 40  # of a log, in a message

#: Variables of every measured process.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}

#: The engines of both sides in each place, by side and place.
Engines = Mapping[tuple[str, int], Kept]


@dataclass(frozen=True)
class Start:
    """Engines that are started together.

    Attributes:
        engine: for the report, see :class:`bench.run.Slice`.
        sides: the two that are compared.
        cases: label of each case to the child's argument for it.
        spec: for :mod:`bench.child`.
    """

    engine: str
    sides: tuple[str, str]
    cases: Mapping[str, Any]
    spec: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """Measurements of a run.

    Attributes:
        load: see :class:`bench.run.Run`.
        title: a sentence on the load.
        environment: further variables of every child than :data:`ENVIRONMENT`.
        starts: in order.
        client: the installation that every child imports; None for its side's own.
        caches: variables of directories for compiled code, one for each side and place, since what
            the overlay compiles early would be found by stock.
    """

    load: str
    title: str
    environment: Mapping[str, str]
    starts: Sequence[Start]
    client: str | None = None
    caches: Sequence[str] = ()


class Measurement:
    """A plan that is carried out; results are written after each slice.

    Args:
        args: of the program.
        installations: stock and overlaid.
        plan: the measurements.
    """

    def __init__(self, args: argparse.Namespace, installations: Installations, plan: Plan) -> None:
        self.args, self.installations, self.plan = args, installations, plan
        self._began = time.monotonic()
        #: The longest seconds of a start and of a round.
        self._longest = {"start": 0.0, "round": 0.0}
        self._count = 0
        inherited = {name: v for name, v in os.environ.items() if name.startswith(_SETTINGS)}
        self.run = Run(
            command=_command(),
            commit=_commit(),
            date=datetime.now(timezone.utc).date().isoformat(),
            device="CPU",
            host=f"{len(os.sched_getaffinity(0))} cores of {_cpu()}",
            digests=dict(installations.digests),
            environment={**inherited, **ENVIRONMENT, **plan.environment},
            load=plan.load,
            title=plan.title,
        )
        self._host = self.run.host

    def execute(self) -> int:
        """Measure, and write and print the results.

        Returns:
            0 if everything was measured; 1 if not; 130 after Ctrl-C.

        Raises:
            KeyboardInterrupt: before anything was measured.
        """
        try:
            self._measure()
            self.run.complete = True
        except KeyboardInterrupt:
            if not self.run.slices:
                raise
            print("\nbench: stopped; the slices so far are kept", file=sys.stderr)
        try:
            self.installations.check_untouched()
        except Failure as error:
            self.run.problems.append(str(error))
        text = self._write()
        print(f"\n{text}\nrun.json and run.md are in {self.args.out}", flush=True)
        return int(bool(self.run.problems)) if self.run.complete else 130

    def _measure(self) -> None:
        """Measure each start; one that fails leaves a problem."""
        for start in self.plan.starts:
            about = f"{start.engine}, {'/'.join(start.sides)}"
            if self._is_late(sum(self._longest.values()), about):
                continue
            try:
                began = time.monotonic()
                with self._engines(start, about) as engines:
                    self._note("start", began)
                    for number in range(1, self.args.rounds + 1):
                        if self._is_late(self._longest["round"], f"{about}, round {number}"):
                            break
                        began = time.monotonic()
                        self._round(start, engines, number)
                        self._note("round", began)
            except Failure as error:
                self.run.problems.append(str(error))
                print(error, file=sys.stderr, flush=True)

    def _is_late(self, seconds: float, about: str) -> bool:
        late: bool = time.monotonic() - self._began + seconds > self.args.limit
        if late:
            print(f"bench: {about} would end too late", file=sys.stderr, flush=True)
        return late

    def _note(self, name: str, began: float) -> None:
        self._longest[name] = max(self._longest[name], time.monotonic() - began)

    @contextlib.contextmanager
    def _engines(self, start: Start, about: str) -> Iterator[Engines]:
        """Start the engines of both sides in each place, and end them.

        Raises:
            Failure: a process failed, or took too long; its log is kept.
        """
        engines: dict[tuple[str, int], Kept] = {}
        logs: list[Path] = []
        try:
            for place, own in enumerate(cores(self.args.places)):
                for side in start.sides:
                    self._count += 1
                    logs.append(self.installations.work / f"{side}-{place}-{self._count}.log")
                    engines[side, place] = self._start(start, side, place, own, logs[-1])
            for (side, _), each in engines.items():
                about_child = each.answer(_START)
                self.run.device = about_child["device"]
                if side != self.installations.peer:
                    self.run.host = f"{self._host}, {about_child['versions']}"
            yield engines
            for each in engines.values():  # all are asked to end before one is waited for
                each.ask(None)
            for each in engines.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(_END)
        except Failure as error:
            tails = [f"{shutil.copy(log, self.args.out)}:\n{_tail(log)}" for log in logs]
            raise Failure("\n".join([f"{about}: {error}", *tails])) from error
        finally:
            for each in engines.values():
                end(each.process)

    def _start(self, start: Start, side: str, place: int, own: Sequence[int], log: Path) -> Kept:
        """Start a side's engine in a place, with its share of the GPUs and its own cores."""
        share = len(self.args.gpus) // self.args.places
        devices = ",".join(self.args.gpus[place * share :][:share])
        base, _, switch = side.partition("=")
        imported = "overlaid" if base.startswith("overlaid") else "stock"
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(base.endswith("mrv2")))}
        if base == self.installations.peer:
            imported, runner = base, {}
        caches = self.installations.work / f"{side}-{place}-compiled"
        environment = {
            **ENVIRONMENT,
            **self.plan.environment,
            **{name: str(caches / name.lower()) for name in self.plan.caches},
            **runner,
            **({"VLLM_READINESS": switch} if switch else {}),
            **({"CUDA_VISIBLE_DEVICES": devices} if devices else {}),
        }
        spec = {
            **start.spec,
            "cores": list(own),
            "memory": 0.4,  # of the GPU's; the other side has as much
            "path": self.installations.path(imported),
        }

        def begin(descriptor: int) -> subprocess.Popen[bytes]:
            return self.installations.start(
                self.plan.client or imported,
                ["-m", "bench.child", str(descriptor)],
                log,
                environment,
                pass_fds=[descriptor],
            )

        return Kept(begin, spec)

    def _round(self, start: Start, engines: Engines, number: int) -> None:
        """Measure each case in both orders, and keep the slices."""
        together = self.args.places == 2
        for label, case in start.cases.items():
            for order, sides in enumerate((start.sides, start.sides[::-1])):
                placed = [(side, engines[side, n * together]) for n, side in enumerate(sides)]
                answers: dict[str, Any] = {}
                for work, seconds in (("warm_up", 0.0), ("measure", self.args.seconds)):
                    for group in (placed,) if together else ([one] for one in placed):
                        for _, kept in group:
                            kept.ask((work, case, 2 * number + order))
                        for side, kept in group:
                            answers[side] = kept.answer(seconds + _SLICE)
                # Measured at the same time, noise meets both sides, and the rest is their own.
                reasons = ("limits",) if together else ("limits", "noise")
                disturbed = [
                    f"{side}: {text}"
                    for side in start.sides
                    for kind in reasons
                    for text in answers[side].get(kind, ())
                ]
                first, second = (answers[side]["figures"] for side in start.sides)
                about = (number, order, start.engine, label, start.sides)
                self._keep(Slice(*about, [first, second], disturbed))

    def _keep(self, one: Slice) -> None:
        """Keep a slice, and write and print it."""
        self.run.slices.append(one)
        self._write()
        first, second = one.figures
        shown = next((name for name in first if one.ratio(name) and name != BUSY), None)
        figure = f"{shown} {first[shown]:,.4g} / {second[shown]:,.4g}" if shown else "no figure"
        about = f"{one.engine}, {one.case}, {'/'.join(one.sides)}, round {one.round}"
        print(
            "; ".join([f"{self.run.seconds:.0f} s, {about}: {figure}", *one.disturbed]), flush=True
        )

    def _write(self) -> str:
        """Write the results so far; return them as Markdown."""
        self.run.seconds = round(time.monotonic() - self._began, 1)
        save(self.args.out / "run.json", self.run)
        text = markdown(self.run)
        replace(self.args.out / "run.md", text.encode())
        return text


def measure(args: argparse.Namespace, plan: Callable[[Installations], Plan]) -> int:
    """Measure with views of the installation that is named.

    Returns:
        As :meth:`Measurement.execute`; 1 if there is no such installation.
    """
    try:
        with installed(args.site, args.python, args.peer) as installations:
            named = {PEER: installations.peer}
            args.pairs = [tuple(named.get(side, side) for side in sides) for sides in args.pairs]
            return Measurement(args, installations, plan(installations)).execute()
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench: stopped; nothing was measured", file=sys.stderr)
        return 130


def cores(places: int) -> list[list[int]]:
    """Divide the CPUs among places; hyperthreads of a core stay together."""

    def topology(cpu: int) -> list[int]:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            names = ("physical_package_id", "core_id")
            return [*(int((folder / name).read_text()) for name in names), cpu]
        except (OSError, ValueError):
            return [0, cpu, cpu]

    ordered = sorted(os.sched_getaffinity(0), key=topology)
    share = max(1, len(ordered) // places)
    return [sorted(ordered[share * place : share * (place + 1)]) for place in range(places)]


def _command() -> str:
    """Return the command that repeats this process."""
    return "PYTHONPATH=scripts " + shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]])


def _commit() -> str:
    """Return the commit that is checked out, with "-dirty" if files differ; empty if unknown."""
    line = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if name := re.search(r"^model name\s*:\s*(.+?)\s*$", text, re.MULTILINE):
            return name[1]
    return platform.machine()


def _tail(log: Path) -> str:
    """Return the last lines of a log, each cut at 300 characters."""
    return "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-_LINES:])
