"""Measure requests on an engine: stock vLLM, the overlay, and stock's Model Runner V2.

    PYTHONPATH=scripts python -m bench.engine [--site SITE] [--rows NAME...] [--out DIR] [--keep]

SITE is an installation of vLLM, and stays as it is: views of its vllm package are measured. Each
engine runs in a process of its own, the sides by turns, all of them under the probe. With --keep
each engine is started once, and stays while the others take their turns. DIR gets run.json, the
tables as run.md, and the page run.html. Ctrl-C ends the run and keeps what was measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlay import output
from probe import engines, records

from bench.compare import clock, command_line
from bench.compare.installations import PLUGIN, Installations, end, in_turn, log_tail
from bench.compare.machine import gpus
from bench.compare.run import (
    SIDES,
    WITHOUT_FIXES,
    Job,
    Run,
    Table,
    measured_sides,
    origin,
    run,
)
from bench.compare.summary import CaseResult
from bench.engines.prompts import Place
from bench.engines.rows import BASELINE, ROWS, Row
from bench.engines.slices import Baton
from bench.engines.step_figures import results
from bench.engines.turns import Kept
from bench.errors import Failure
from bench.plugins import announce

_RUNNER, _PROBE = "VLLM_USE_V2_MODEL_RUNNER", "VLLM_READINESS_PROBE"
#: One process, so that the driver can interfere with the steps; a sampler without compiler.
IN_ONE_PROCESS: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class EngineRun(Run):
    """A run of rows; those of one engine are a group."""

    environment: Mapping[str, str] = {**WITHOUT_FIXES, **IN_ONE_PROCESS}

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        self._rows: dict[str, Row] = {}
        for name in args.rows:
            row = ROWS[name].sized(args.size, args.output)
            if ROWS[name].engine.runner == 2 and not args.gpu:
                print(f"{name} needs a GPU, and is left out", file=sys.stderr)
            elif row.engine.tensor_parallel > max(1, args.gpus):
                count = row.engine.tensor_parallel
                print(f"{name} needs {count} GPUs, and is left out", file=sys.stderr)
            else:
                self._rows[name] = row
        tables = {name: _table(row, args) for name, row in self._rows.items()}
        super().__init__(args, installations, tables)
        self._kept: dict[tuple[str, str], Kept] = {}
        self._batons: dict[str, Baton] = {}
        self._begun: dict[str, int] = {}

    def jobs(self) -> list[Job]:
        """Return the jobs in order; where engines are kept, all of one group first."""
        jobs = super().jobs()
        if not self.args.keep:
            return jobs
        groups = dict.fromkeys(job.group for job in jobs)
        return [job for group in groups for job in jobs if job.group == group]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure one engine in a process of its own.

        Raises:
            Failure: it failed, took too long, or ran on another model runner than it should.
        """
        rows = self._rows_of(job.group)
        module, environment, paths = self._driver(job)
        if self.args.keep:
            driven = self._turn(job)
        else:
            timeout = self.args.timeout
            driven = self.child(job.name, job.side, module, environment, timeout, paths)
        runner = int(environment[_RUNNER]) + 1
        if driven["runner"] not in (None, runner):
            raise Failure(f"{job.name} ran on Model Runner V{driven['runner']}, not V{runner}")
        try:
            processes, _ = engines.engine(Path(environment[_PROBE]))
        except records.ProbeError as error:
            raise Failure(f"{job.name}: {error}") from error
        self.device = driven["device"]
        for row in rows:
            self.tables[row.name].about["scheduling"] = driven["scheduling"]
        read = {row.name: results(row, driven["rows"][row.name], processes) for row in rows}
        for name, cases in read.items():
            self._check_clock(job, name, cases)
        return read

    def _check_clock(self, job: Job, row: str, cases: Mapping[str, CaseResult]) -> None:
        """Compare each case's time on the child's clock with that on this process's."""
        child = self._driver_name(job)
        for case, result in cases.items():
            heard = self.clock.between(child, json.dumps(Place(job.round, row, case)))
            own, longest = (each or 0 for each in result.clock)
            result.clock = [own, longest, heard]
            if (problem := clock.problem(own, longest, heard)) is not None:
                result.problems = [*result.problems, problem]

    def _rows_of(self, group: str) -> list[Row]:
        return [row for row in self._rows.values() if row.engine.name == group]

    def _driver(self, job: Job) -> tuple[list[str], dict[str, str], list[Path]]:
        """Return a driver's module with its arguments, its variables, and its path entries."""
        args, work, rows = self.args, self.installations.work, self._rows_of(job.group)
        name = self._driver_name(job)
        environment = {
            **self.clock.variable(name),
            # Set whatever the model: vLLM would choose by it.
            _RUNNER: "1" if job.side == SIDES[2] else str(rows[0].engine.runner - 1),
            _PROBE: str(work / f"{name}.probe"),
        }
        module = ["bench.engines.driver", "--size", args.size]
        module += [] if args.keep else ["--round", str(job.round)]
        module += ["--rows", *(row.name for row in rows)]
        module += ["--model", str(args.model)] if args.model else []
        module += ["--output", str(args.output)] if args.output else []
        if args.gpu:
            return module, environment, [PLUGIN]
        # With it, stock can force tokens where there is no driver. Both sides load it.
        unpinned = announce(work / "unpinned", "bench.thinking:unpin")
        return module, environment, [PLUGIN, unpinned]

    def _driver_name(self, job: Job) -> str:
        """Return the name of the process that measures a job."""
        return f"{job.group}, {job.side}, kept" if self.args.keep else job.name

    def _turn(self, job: Job) -> dict[str, Any]:
        """Return what a driver that keeps its engine measured in a round.

        The drivers of a group take a round together, in slices. Each ends after its last round.

        Raises:
            Failure: it failed, or took too long; its log is kept.
        """
        last = job.round == self.args.rounds
        log = self._out(job).with_suffix(".log")
        try:
            if job.round > self._begun.get(job.group, 0):
                self._begin(job)
            # The others' slices are between its own.
            timeout = self.args.timeout * len(self._sides(job.group))
            return self._running(job).result(timeout)
        except Failure as error:
            last = True
            copy = shutil.copy(log, self.args.out) if log.exists() else log
            raise Failure(f"{job.name}: {error} (log: {copy}):\n{log_tail(log)}") from error
        finally:
            if last:
                self._end(job)

    def _running(self, job: Job) -> Kept:
        kept = self._kept.get((job.group, job.side))
        if kept is None:
            raise Failure("its engine has failed before")
        return kept

    def _begin(self, job: Job) -> None:
        """Begin a round of a group; its engines are started before the first."""
        self._begun[job.group] = job.round
        sides = self._sides(job.group)
        if job.round == 1:
            path = self.installations.work / f"{job.group.replace(' ', '-')}.baton"
            self._batons[job.group] = Baton.make(path, len(sides))
            with self._limit.once(job.group):
                for place, side in enumerate(sides):
                    self._start(Job(job.group, side, 1), path, place)
        order = [side for side in in_turn(job.round - 1, sides) if (job.group, side) in self._kept]
        if order:
            self._batons[job.group].offer([sides.index(side) for side in order])
        for side in order:
            self._kept[job.group, side].ask()

    def _start(self, job: Job, baton: Path, place: int) -> None:
        """Start an engine; one that fails is said to have failed when its turn comes."""
        module, environment, paths = self._driver(job)
        out = self._out(job)
        count = len(self._sides(job.group))
        command = ["-m", module[0], str(out), *module[1:], "--kept", str(count)]
        command += ["--baton", str(baton), "--place", str(place)]
        variables = {**self.environment, **environment}
        log = out.with_suffix(".log")
        process = self.installations.start(origin(job.side), command, log, variables, paths)
        self._kept[job.group, job.side] = kept = Kept(process, out)
        try:
            # Two engines that start at once would count each other's memory.
            kept.started(self.args.timeout)
        except Failure as error:
            self._errors.append(f"{job.name}: {error}")
            self._end(job)

    def _end(self, job: Job) -> None:
        """End an engine, and let the others go on."""
        if (kept := self._kept.pop((job.group, job.side), None)) is not None:
            end(kept.process)
            self._batons[job.group].leave(self._sides(job.group).index(job.side))

    def leave_out(self, job: Job) -> None:
        """End a job's engine, which others may need the memory of."""
        self._end(job)

    def _sides(self, group: str) -> Sequence[str]:
        return next(table.sides for table in self.tables.values() if table.group == group)

    def _out(self, job: Job) -> Path:
        return self.out(self._driver_name(job))

    def execute(self) -> int:
        """Measure, and end the engines that are still there; see :meth:`Run.execute`."""
        try:
            with clock.listening() as self.clock:
                return super().execute()
        finally:
            for kept in self._kept.values():
                end(kept.process)


def _table(row: Row, args: argparse.Namespace) -> Table:
    engine = row.engine
    about = {
        "title": row.title,
        "source": row.source,
        "model": args.model.resolve().name if args.model else dict(engine.model),
        **{key: getattr(engine, key) for key in ("batch", "prompt", "runner", "thinking")},
        "output": row.output,
    }
    cases = {name: asdict(case) for name, case in row.cases.items()}
    sides = measured_sides(engine.sides(args.gpu), args)
    return Table(list(sides), about, cases, engine.name, BASELINE)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables; see :func:`bench.compare.run.run`."""
    gpu = Path("/dev/nvidiactl").exists()
    options = command_line.parser(__doc__ or "", rounds=5)
    options.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    command_line.add_sides(options, SIDES if gpu else SIDES[:2])
    command_line.add_again(options)
    command_line.add_limit(options)
    options.add_argument("--output", type=int, help="tokens of each request (the row's own number)")
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    text = "start each engine once, and share the device's memory among the sides"
    options.add_argument("--keep", action="store_true", help=text)
    size = "full" if gpu else "small"
    options.add_argument("--size", choices=("full", "small", "tiny"), default=size)
    options.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    args = command_line.parse(options, argv)
    args.gpu, args.gpus = gpu, len(gpus())
    return run(args, lambda installations: EngineRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
