"""Measure requests on an engine: stock vLLM, the overlay, and stock's Model Runner V2.

    PYTHONPATH=scripts python -m bench.engine [--site SITE] [--rows NAME...] [--out DIR]

SITE is an installation of vLLM, and stays as it is: views of its vllm package are measured. Each
engine runs in a process of its own, the sides by turns, all of them under the probe. DIR gets
run.json, the tables as run.md, and the page run.html. Ctrl-C ends the run and keeps what was
measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlay import output
from probe import records

from bench.compare import command_line, machine
from bench.compare.installations import PLUGIN, Installations, log_tail, work_beside
from bench.compare.progress import progress
from bench.compare.turns import in_turn
from bench.engines.rows import ROWS, Engine, Row
from bench.engines.step_figures import Child
from bench.engines.summary import summarise
from bench.errors import Failure
from bench.reports.markdown import markdown
from bench.reports.page import page
from bench.reports.run_file import replace

#: One process, so that the driver can interfere with the steps; a sampler that needs no compiler.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: The model runner of a side that does not take its engine's.
RUNNER = {"mrv2": 2}


@dataclass
class Job:
    """One engine on one side in one round."""

    engine: Engine
    rows: Sequence[Row]
    side: str
    turn: int

    @property
    def name(self) -> str:
        """Engine, side and round."""
        return f"{self.engine.name}, {self.side}, round {self.turn}"

    @property
    def parts(self) -> int:
        """The parts of its progress: the engine's start, and each case."""
        return 1 + sum(len(row.cases) for row in self.rows)


class Run:
    """A run: its installations, and the children that have finished."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.work = work
        self.started = time.monotonic()
        self.gpu = args.device == "gpu"
        self.children: list[tuple[Job, Child]] = []
        self.errors: list[str] = []
        self.complete = False
        self.model = args.model.resolve().name if args.model else None
        self.rows = []
        for name in args.rows:
            if ROWS[name].engine.runner == 1 or self.gpu:
                self.rows.append(ROWS[name].sized(args.size, args.output))
            else:
                print(f"{name} needs a GPU, and is left out", file=sys.stderr)
        self.installations = Installations(args.site, work, args.python)
        for side, digest in self.installations.digests.items():
            print(f"{side}: digest {digest[:12]}, proven by checksum", flush=True)

    def jobs(self) -> list[Job]:
        """Return the jobs in order: by rounds, and the sides of an engine by turns."""
        engines: dict[str, list[Row]] = {}
        for row in self.rows:
            engines.setdefault(row.engine.name, []).append(row)
        return [
            Job(rows[0].engine, rows, side, turn + 1)
            for turn in range(self.args.rounds)
            for rows in engines.values()
            for side in in_turn(turn, self._sides(rows[0]))
        ]

    def _sides(self, row: Row) -> list[str]:
        return [side for side in row.engine.sides(self.gpu) if side in self.args.sides]

    def measure(self) -> None:
        """Run every job; a child that fails leaves an error behind."""
        jobs = self.jobs()
        with progress(sum(job.parts for job in jobs)) as bar:
            for job in jobs:
                bar.set_description(job.name)
                try:
                    self.children.append((job, self._child(job, bar)))
                except Failure as error:
                    self.errors.append(str(error))
                    bar.write(str(error))
                    continue
                self.write()
        self.complete = True

    def write(self) -> dict[str, Any]:
        """Write the results so far, of one child at least; return the run's JSON."""
        result = self.children[0][1].result
        described = machine.describe(
            *("engine", self.started, self.installations.digests),
            *(result["device"], self.args.site),
        )
        described["versions"]["python"] = result["python"]
        seen = {job.side for job, _ in self.children}
        run = {
            **described,
            "complete": self.complete,
            "environment": machine.settings(ENVIRONMENT),
            "model": self.model,
            "sides": [side for side in ("stock", "overlaid", "mrv2") if side in seen],
            "rows": {
                row.name: summarise(row, self._sides(row), children, self.model)
                for row in self.rows
                if (children := [child for job, child in self.children if row in job.rows])
            },
            "errors": self.errors,
        }
        replace(self.args.out / "run.json", json.dumps(run, indent=1))
        replace(self.args.out / "run.md", markdown(run))
        return run

    def _child(self, job: Job, bar: Any) -> Child:
        """Measure one engine on one side in a process of its own.

        Raises:
            Failure: it failed, took too long, or imported another vLLM than it should.
        """
        stem = self.work / f"{job.engine.name}-{job.turn}-{job.side}".replace(" ", "-")
        out, log, done = (stem.with_suffix(end) for end in (".json", ".log", ".done"))
        probe = stem.with_suffix(".probe")
        command = [self.args.python, "-m", "bench.engines.driver", str(out), str(done)]
        command += ["--size", self.args.size, "--rows", *(row.name for row in job.rows)]
        command += ["--model", str(self.args.model)] if self.args.model else []
        command += ["--output", str(self.args.output)] if self.args.output else []
        runner = RUNNER.get(job.side, job.engine.runner)
        environment = {
            **ENVIRONMENT,
            # Set whatever the model: vLLM would choose by it.
            "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
            "VLLM_READINESS_PROBE": str(probe),
        }
        done.touch()
        seen = 0

        def watch() -> None:
            nonlocal seen
            now = done.read_text().count("\n")
            bar.update(now - seen)
            seen = now

        side = "stock" if job.side == "mrv2" else job.side
        paths = [PLUGIN] if self.gpu else [PLUGIN, self._unpinned()]
        code = self.installations.run(
            side, command, log, self.args.timeout, environment, watch, paths
        )
        watch()
        if code != 0:
            bar.update(job.parts - seen)
            kept = shutil.copy(log, self.args.out)
            raise Failure("\n".join([f"{job.name} failed ({code}; log: {kept}):", *log_tail(log)]))
        result: dict[str, Any] = json.loads(out.read_text())
        self.installations.check_import(side, result["package"])
        if result["runner"] not in (None, runner):
            raise Failure(f"{job.name} ran on Model Runner V{result['runner']}, not V{runner}")
        try:
            processes, _ = records.engine(probe)
        except records.ProbeError as error:
            raise Failure(f"{job.name}: {error}") from error
        return Child(job.side, job.turn, result, processes)

    def _unpinned(self) -> Path:
        """Make a path entry that announces :func:`bench.thinking.unpin` as a plugin of vLLM.

        With it, stock can force tokens where there is no driver. Both sides load it.
        """
        folder = self.work / "unpinned"
        metadata = folder / "bench_unpinned.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-unpinned\n")
        entry = "[vllm.general_plugins]\nbench_unpinned = bench.thinking:unpin\n"
        (metadata / "entry_points.txt").write_text(entry)
        return folder


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, and fill in what was not given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command_line.add_target(parser)
    parser.add_argument(
        "--rounds",
        type=command_line.rounds,
        default=4,
        help="measurements of each side (%(default)s); ratios of fewer than three are marked. In "
        "a multiple of the number of sides, each side is first equally often",
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    sides = ("stock", "overlaid", "mrv2")
    parser.add_argument("--sides", nargs="+", choices=sides, help="(all that the device allows)")
    parser.add_argument("--output", type=int, help="tokens of each request (the row's own number)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="(that of the machine)")
    parser.add_argument("--size", choices=("full", "small", "tiny"), help="(full on a GPU)")
    work = "directory for the views and the children's files, kept (a temporary one beside SITE)"
    parser.add_argument("--work", type=Path, help=work)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    args = parser.parse_args(argv)
    command_line.resolve_target(parser, args)
    args.device = args.device or ("gpu" if Path("/dev/nvidiactl").exists() else "cpu")
    args.size = args.size or ("full" if args.device == "gpu" else "small")
    if args.sides == ["mrv2"] and args.device == "cpu":
        parser.error("--sides mrv2: Model Runner V2 needs a GPU; name overlaid")
    # Every side is compared with stock.
    args.sides = {"stock", *(args.sides or sides)}
    command_line.make_directory(parser, "--out", args.out)
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables.

    Returns:
        0 if every child ran and every side returned the same as stock; 1 if not; 130 after
        Ctrl-C.
    """
    args = arguments(argv)
    command_line.end_on_signals()
    command_line.leave_out()
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="bench-", dir=args.work)).resolve()
    else:
        work = work_beside(args.site)
    try:
        return _measure(args, work)
    except Failure as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbench: stopped; run.json has what was measured", file=sys.stderr)
        return 130
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)


def _measure(args: argparse.Namespace, work: Path) -> int:
    """Run the benchmark and write its results; return the exit code.

    Raises:
        Failure: there is no such installation, or it is not what it was.
    """
    run = Run(args, work)
    code = 0
    try:
        run.measure()
    except KeyboardInterrupt:
        code = 130
        print("\nstopped; what was measured is kept", file=sys.stderr)
    run.installations.check_untouched()
    if not run.children:
        print("bench: nothing was measured", *run.errors, sep="\n", file=sys.stderr)
        return code or 1
    result = run.write()
    print(f"\n{markdown(result)}", flush=True)
    try:
        replace(args.out / "run.html", page(result))
        print(f"{args.out}: run.json, run.md and run.html")
    except Failure as error:
        print(f"{args.out}: run.json and run.md, but no page: {error}")
    return code or int(bool(run.errors) or _spoilt(result))


def _spoilt(run: Mapping[str, Any]) -> bool:
    """Return whether a problem refuses a ratio of the overlaid side."""
    return any(
        case["problems"].get(side)
        for row in run["rows"].values()
        for case in row["cases"].values()
        for side in ("stock", "overlaid")
    )


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
