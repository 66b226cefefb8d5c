"""The engine on stock vLLM beside the overlaid one, and beside MRV2, in one run.

    PYTHON scripts/bench/engine.py [--site SITE] [--model PATH] [--rows NAME...] [--out DIR]

SITE is an installation of vLLM, and stays as it is: what it lacks, the overlay or its
absence, is made in a view of its vllm package, hard links where the file system allows.
Each engine runs in a process of its own, the sides by turns, and all of them run the
probe. DIR gets run.json, the table as run.md, and the page run.html. Ctrl-C ends the run
and keeps what was measured.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: nothing is there to clean up

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ in ("__main__", "__mp_main__"):
    sys.path[0] = str(ROOT / "scripts")

from bench import machine, report, summary  # noqa: E402
from bench.progress import progress  # noqa: E402
from bench.rows import DEFAULT, ROWS, Engine, Row  # noqa: E402
from bench.sides import (  # noqa: E402
    PLUGIN,
    Failure,
    Sides,
    end_on_signals,
    in_turn,
    leave_out,
    target,
    work_beside,
)
from bench.summary import Child  # noqa: E402
from overlay import output  # noqa: E402
from probe import records  # noqa: E402

#: One process, so that the steps can be interfered with from outside; the sampler that
#: needs no compiler on the machine.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
#: What a side's engine is started with besides.
RUNNER = {"mrv2": 2}


class Job:
    """One engine on one side in one round."""

    def __init__(self, engine: Engine, rows: Sequence[Row], side: str, turn: int) -> None:
        self.engine = engine
        self.rows = rows
        self.side = side
        self.turn = turn
        #: Starting the engine is one thing to wait for, each case is another.
        self.parts = 1 + sum(len(row.cases) for row in rows)

    @property
    def name(self) -> str:
        """How it is spoken of."""
        return f"{self.engine.name}, {self.side}, round {self.turn}"


class Run:
    """The installations, the children and what they found so far."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        self.args = args
        self.work = work
        self.started = time.monotonic()
        self.gpu = args.device == "gpu"
        self.children: list[tuple[Job, Child]] = []
        self.errors: list[str] = []
        self.complete = False
        # Model Runner V2 needs a GPU.
        names = [name for name in args.rows if self.gpu or ROWS[name].engine.runner == 1]
        for name in args.rows:
            if name not in names:
                print(f"{name} needs a GPU, and is left out", file=sys.stderr)
        self.rows = [_fitting(ROWS[name], args) for name in names]
        self.sides = Sides(args.site, work, args.python)
        for side, digest in self.sides.digests.items():
            print(f"{side}: digest {digest[:12]}, proven by checksum", flush=True)

    def jobs(self) -> list[Job]:
        """What is to be done, in its order: by rounds, the sides of an engine by turns."""
        engines: dict[str, list[Row]] = {}
        for row in self.rows:
            engines.setdefault(row.engine.name, []).append(row)
        jobs = []
        for turn in range(self.args.rounds):
            for rows in engines.values():
                engine = rows[0].engine
                sides = [side for side in engine.sides(self.gpu) if side in self.args.sides]
                jobs += [Job(engine, rows, side, turn + 1) for side in in_turn(turn, sides)]
        return jobs

    def measure(self) -> None:
        """Every engine, side and round; a child that fails leaves an error behind."""
        jobs = self.jobs()
        with progress(sum(job.parts for job in jobs)) as bar:
            for job in jobs:
                bar.set_description(job.name)
                try:
                    child = self._child(job, bar)
                except Failure as error:
                    self.errors.append(str(error))
                    bar.write(str(error))
                    continue
                self.children.append((job, child))
                self.write()
        self.complete = True

    def write(self) -> dict[str, Any]:
        """Write what there is so far, one child at least; the run."""
        found = self.children[0][1].found
        described = machine.describe(
            "engine", self.started, self.sides.digests, found["device"], self.args.site
        )
        described["versions"]["python"] = found["python"]
        whole = {
            **described,
            "complete": self.complete,
            "environment": machine.settings(ENVIRONMENT),
            "model": self._model(),
            "sides": [side for side in ("stock", "overlaid", "mrv2") if side in self._seen()],
            "rows": {row.name: self._row(row) for row in self.rows if self._of(row)},
            "errors": self.errors,
        }
        report.replace(self.args.out / "run.json", json.dumps(whole, indent=1))
        report.replace(self.args.out / "run.md", report.markdown(whole))
        return whole

    def _seen(self) -> set[str]:
        return {job.side for job, _ in self.children}

    def _of(self, row: Row) -> list[Child]:
        return [child for job, child in self.children if row in job.rows]

    def _row(self, row: Row) -> dict[str, Any]:
        sides = [side for side in row.engine.sides(self.gpu) if side in self.args.sides]
        return summary.row(row, sides, self._of(row), self._model())

    def _model(self) -> str | None:
        return Path(self.args.model).resolve().name if self.args.model else None

    def _child(self, job: Job, bar: Any) -> Child:
        """Measure one engine on one side in a process of its own.

        Raises:
            Failure: it failed, took too long, or imported another vLLM than it should.
        """
        stem = self.work / f"{job.engine.name}-{job.turn}-{job.side}".replace(" ", "-")
        out, log, done = (stem.with_suffix(end) for end in (".json", ".log", ".done"))
        probe = stem.with_suffix(".probe")
        command = [self.args.python, str(Path(__file__).resolve()), "child", str(out), str(done)]
        command += ["--size", self.args.size]
        command += ["--model", str(self.args.model)] if self.args.model else []
        command += ["--rows", *(row.name for row in job.rows)]
        runner = RUNNER.get(job.side, job.engine.runner)
        environment = {
            **ENVIRONMENT,
            # Set whatever the model, for which vLLM would choose.
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
        paths = [PLUGIN] if self.gpu else [PLUGIN, self._unpinned(), ROOT / "scripts"]
        code = self.sides.run(side, command, log, self.args.timeout, environment, watch, paths)
        watch()
        if code != 0:
            bar.update(job.parts - seen)
            kept = shutil.copy(log, self.args.out)
            tail = [line[:300] for line in log.read_text(errors="replace").splitlines()[-40:]]
            raise Failure("\n".join([f"{job.name} failed ({code}; log: {kept}):", *tail]))
        found: dict[str, Any] = json.loads(out.read_text())
        self.sides.check_import(side, found["package"])
        if found["runner"] not in (None, runner):
            raise Failure(f"{job.name} ran on Model Runner V{found['runner']}, not V{runner}")
        try:
            processes, _ = records.engine(probe)
        except records.ProbeError as error:
            raise Failure(f"{job.name}: {error}") from error
        return Child(job.side, job.turn, found, processes)

    def _unpinned(self) -> Path:
        """A plugin with which stock can force tokens where there is no driver.

        Both sides have it; see :func:`bench.thinking.unpin`.
        """
        folder = self.work / "unpinned"
        metadata = folder / "bench_unpinned.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-unpinned\n")
        entry = "[vllm.general_plugins]\nbench_unpinned = bench.thinking:unpin\n"
        (metadata / "entry_points.txt").write_text(entry)
        return folder


def _fitting(row: Row, args: argparse.Namespace) -> Row:
    """The row at the size that was asked for."""
    return {"full": lambda: row, "small": row.small, "tiny": row.tiny}[args.size]()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--venv", help="the installation: a virtual environment's directory,")
    parser.add_argument("--site", help="or a site-packages directory")
    parser.add_argument("--python", help="what runs the engines, if not the environment's")
    parser.add_argument("--model", help="directory of a model; without it one is generated")
    parser.add_argument("--out", type=Path, help="directory for the results (build/bench/TIME)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="of each engine (%(default)s); ratios of fewer than three are marked, and each side "
        "is first equally often in a multiple of their number",
    )
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(DEFAULT))
    parser.add_argument(
        "--sides", nargs="+", choices=("stock", "overlaid", "mrv2"), help="(all there are)"
    )
    parser.add_argument("--device", choices=("cpu", "gpu"), help="(what the machine has)")
    parser.add_argument("--size", choices=("full", "small", "tiny"), help="(full on a GPU)")
    parser.add_argument(
        "--work",
        type=Path,
        help="directory for the views, and for what the children write; kept. "
        "Without it a temporary one beside SITE, where links to it work",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    return parser


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """What was asked for, with what goes without saying."""
    parser = _parser()
    args = parser.parse_args(argv)
    target(parser, args)
    if args.rounds < 1:
        parser.error("--rounds is at least 1")
    if args.out.is_file():
        parser.error(f"--out {args.out} is a file; name a directory")
    if args.model and not (Path(args.model) / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; name a model's directory")
    args.device = args.device or ("gpu" if Path("/dev/nvidiactl").exists() else "cpu")
    args.size = args.size or ("full" if args.device == "gpu" else "small")
    if args.sides == ["mrv2"] and args.device == "cpu":
        parser.error("--sides mrv2: Model Runner V2 needs a GPU; name overlaid")
    # Whatever is measured is held against stock.
    args.sides = {"stock", *(args.sides or ("overlaid", "mrv2"))}
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, print the table; 0 if every child ran and every side gave the same as stock."""
    args = arguments(argv)
    end_on_signals()
    leave_out()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work and Path(tempfile.mkdtemp(prefix="bench-", dir=args.work)).resolve()
    work = kept or work_beside(args.site)
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
    """The run, and what is made of it; what the program ends with.

    Raises:
        Failure: there are no such sides, or the installation is not what it was.
    """
    run = Run(args, work)
    code = 0
    try:
        run.measure()
    except KeyboardInterrupt:
        code = 130
        print("\nstopped; what was measured is kept", file=sys.stderr)
    run.sides.check_untouched()
    if not run.children:
        print("bench: nothing was measured", *run.errors, sep="\n", file=sys.stderr)
        return code or 1
    whole = run.write()
    print(f"\n{report.markdown(whole)}", flush=True)
    _page(args.out, whole)
    return code or int(bool(run.errors or any(_spoilt(whole))))


def _page(out: Path, whole: Mapping[str, Any]) -> None:
    """Write the page, or say what it lacks."""
    try:
        report.replace(out / "run.html", report.page(whole))
    except Failure as error:
        print(f"{out}: run.json and run.md, but no page: {error}")
        return
    print(f"{out}: run.json, run.md and run.html")


def _spoilt(whole: Mapping[str, Any]) -> Iterator[str]:
    for row in whole["rows"].values():
        for case in row["cases"].values():
            for side in ("stock", "overlaid"):
                yield from case["problems"].get(side, ())


def child(argv: Sequence[str]) -> int:
    """Measure the rows of one engine in this process."""
    from bench import measure

    parser = argparse.ArgumentParser(prog="engine.py child")
    parser.add_argument("out", type=Path)
    parser.add_argument("done", type=Path)
    parser.add_argument("--rows", nargs="+", required=True, choices=list(ROWS))
    parser.add_argument("--size", required=True)
    parser.add_argument("--model")
    args = parser.parse_args(argv)

    def done(name: str) -> None:
        with args.done.open("a") as file:
            file.write(f"{name}\n")

    measure.main([_fitting(ROWS[name], args) for name in args.rows], args.out, args.model, done)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        raise SystemExit(child(sys.argv[2:]))
    raise SystemExit(output.run("bench", main))
