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
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from overlay import output
from probe import records

from bench.compare import command_line
from bench.compare.installations import PLUGIN, Installations
from bench.compare.run import SIDES, WITHOUT_FIXES, Job, Run, Table, run
from bench.compare.summary import CaseResult
from bench.engines.rows import BASELINE, ROWS, Row
from bench.engines.step_figures import results
from bench.errors import Failure

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
            if ROWS[name].engine.runner == 1 or args.gpu:
                self._rows[name] = ROWS[name].sized(args.size, args.output)
            else:
                print(f"{name} needs a GPU, and is left out", file=sys.stderr)
        tables = {name: _table(row, args) for name, row in self._rows.items()}
        super().__init__(args, installations, tables)

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure one engine in a process of its own.

        Raises:
            Failure: it failed, took too long, or ran on another model runner than it should.
        """
        args, work = self.args, self.installations.work
        rows = [row for row in self._rows.values() if row.engine.name == job.group]
        runner = 2 if job.side == "mrv2" else rows[0].engine.runner
        probe = work / f"{job.name}.probe"
        environment = {
            # Set whatever the model: vLLM would choose by it.
            "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
            "VLLM_READINESS_PROBE": str(probe),
        }
        module = ["bench.engines.driver", "--size", args.size]
        module += ["--rows", *(row.name for row in rows)]
        module += ["--model", str(args.model)] if args.model else []
        module += ["--output", str(args.output)] if args.output else []
        paths = [PLUGIN] if args.gpu else [PLUGIN, _unpinned(work)]
        driven = self.child(job.name, job.side, module, environment, args.timeout, paths)
        if driven["runner"] not in (None, runner):
            raise Failure(f"{job.name} ran on Model Runner V{driven['runner']}, not V{runner}")
        try:
            processes, _ = records.engine(probe)
        except records.ProbeError as error:
            raise Failure(f"{job.name}: {error}") from error
        self.device = driven["device"]
        for row in rows:
            self.tables[row.name].about["scheduling"] = driven["scheduling"]
        return {row.name: results(row, driven["rows"][row.name], processes) for row in rows}


def _table(row: Row, args: argparse.Namespace) -> Table:
    engine = row.engine
    about = {
        "title": row.title,
        "source": row.source,
        "model": args.model.resolve().name if args.model else dict(engine.model),
        **{key: getattr(engine, key) for key in ("batch", "prompt", "runner")},
        "output": row.output,
    }
    # Every side is compared with stock.
    sides = [side for side in engine.sides(args.gpu) if side in ("stock", *args.sides)]
    cases = {name: asdict(case) for name, case in row.cases.items()}
    return Table(sides, about, cases, engine.name, BASELINE)


def _unpinned(work: Path) -> Path:
    """Make a path entry that announces :func:`bench.thinking.unpin` as a plugin of vLLM.

    With it, stock can force tokens where there is no driver. Both sides load it.
    """
    metadata = work / "unpinned" / "bench_unpinned.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-unpinned\n")
    entry = "[vllm.general_plugins]\nbench_unpinned = bench.thinking:unpin\n"
    (metadata / "entry_points.txt").write_text(entry)
    return metadata.parent


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables; see :func:`bench.compare.run.run`."""
    gpu = Path("/dev/nvidiactl").exists()
    sides = SIDES if gpu else SIDES[:2]
    options = command_line.parser(__doc__ or "", rounds=4)
    options.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    options.add_argument("--sides", nargs="+", choices=sides, default=sides)
    options.add_argument("--output", type=int, help="tokens of each request (the row's own number)")
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    size = "full" if gpu else "small"
    options.add_argument("--size", choices=("full", "small", "tiny"), default=size)
    options.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    args = command_line.parse(options, argv)
    args.gpu = gpu
    return run(args, lambda installations: EngineRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
