"""Measure closed-loop traffic: vLLM's AsyncLLM with its engine core in a process of its own.

    PYTHONPATH=scripts python -m bench.traffic [--site SITE] [--pairs A/B...] [--shapes NAME...] ...

A fixed number of requests is in flight, and each that ends is followed by another. Two sides are
measured at a time. With two GPUs they run at the same time, each with a GPU and half of the cores,
and then exchange places; with one GPU they take turns, and then exchange the order. Both are views
of one installation. DIR gets run.json, run.md and run.html, written again after each slice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from overlay import output

from bench.compare import command_line
from bench.compare.installations import Installations, end, log_tail
from bench.compare.machine import gpus
from bench.compare.run import Job, run
from bench.compare.summary import CaseResult
from bench.compare.table_run import TableRun
from bench.engines.turns import Kept
from bench.errors import Failure
from bench.loops import tables
from bench.loops.child import CACHES, GRAPHS, Spec
from bench.loops.rows import ENGINES, ROWS, SHAPES
from bench.plugins import announce

#: Side to the installation that it imports; "again" is stock, and "copy" another view of stock.
_ORIGINS = {"stock": "stock", "again": "stock", "copy": "copy", "mrv2": "stock"}
_OVERLAID = "overlaid"
_SIDE = rf"{'|'.join(_ORIGINS)}|{_OVERLAID}(?:=[^/]+)?"
#: Noise first: two processes of one view, and two views.
PAIRS = (
    *("again/stock", "copy/stock", "overlaid/stock", "overlaid/mrv2"),
    "overlaid/overlaid=-fixes",
)
#: Seconds for an engine to start, for a slice to end beyond its own time, and for an engine to end.
#: A hybrid model's kernels compile for minutes.
_START, _SLICE, _END = 400.0, 240.0, 30.0


class Start(NamedTuple):
    """Engines that are started together.

    Attributes:
        engine: a name of :data:`~bench.loops.rows.ENGINES`.
        graphs: a name of :data:`~bench.loops.child.GRAPHS`.
        thinking: whether they know the markers of thinking.
        sides: the two that are compared.
        cases: shape and row of each slice.
    """

    engine: str
    graphs: str
    thinking: bool
    sides: tuple[str, str]
    cases: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Engine, graphs and sides."""
        return f"{self.about}, {'/'.join(self.sides)}"

    @property
    def about(self) -> str:
        """Engine and graphs."""
        return f"{self.engine} {self.graphs}{' thinking' * self.thinking}"


class TrafficRun(TableRun):
    """A run of rounds, in each of which each pair of sides is measured in both orders."""

    environment: Mapping[str, str] = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # With the eager backend vLLM stores no AOT-compiled model, and computes the hash of its
        # configuration again for each step with piecewise graphs: 1 to 4 ms.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    columns = tables.COLUMNS
    texts = tables.TEXTS

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations, {})
        self.rounds: list[dict[str, Any]] = []
        self._starts = {start.name: start for start in starts(args)}
        if any("copy" in start.sides for start in self._starts.values()):
            installations.add_copy()
        self._plugin = announce(installations.work / "loops", "bench.loops.plugin:register")
        self._count, self._logs = 0, list[Path]()

    def jobs(self) -> list[Job]:
        """Return a job for each start in each round."""
        rounds = range(1, self.args.rounds + 1)
        return [Job(name, "slices", number) for number in rounds for name in self._starts]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure two sides in both orders; each slice is written as it comes.

        Raises:
            Failure: a process failed, or took too long; its log is kept.
        """
        start, together = self._starts[job.group], self.args.places == 2
        self._logs = []
        try:
            # To exchange places, sides start again; to exchange turns, they need not.
            for orders in ((0,), (1,)) if together else ((0, 1),):
                slices = [
                    (order, *case, 2 * job.round + order)
                    for order in orders
                    for case in start.cases
                ]
                with contextlib.ExitStack() as running:
                    kept = self._begin(start, slices, running)
                    for order, shape, row, _ in slices:
                        self._slice(job, start, order, f"{row}, {SHAPES[shape].concurrency}", kept)
        except Failure as error:
            tails = [f"{shutil.copy(log, self.args.out)}:\n{log_tail(log)}" for log in self._logs]
            raise Failure("\n".join([f"{job.name}: {error}", *tails])) from error
        return {}

    def _begin(
        self,
        start: Start,
        slices: Sequence[tuple[int, str, str, int]],
        running: contextlib.ExitStack,
    ) -> dict[str, Kept]:
        """Start both sides' engines, which end with ``running``."""
        args, together, kept = self.args, self.args.places == 2, {}
        for place, side in enumerate(start.sides[::-1] if slices[0][0] else start.sides):
            spec = Spec(
                slices=[case for _, *case in slices],  # type: ignore[misc]
                graphs=start.graphs,
                thinking=start.thinking,
                steps=args.steps,
                cores=cores(args.places)[place if together else 0],
                memory=0.6 if together else 0.4,
                ramp=min(args.seconds / 4, 2.0),
                seconds=args.seconds,
            )
            kept[side] = self._start(side, spec, args.gpus[place if together else 0 :][:1], running)
            if not together:  # on one device, they would count each other's memory
                kept[side].started(_START)
        for each in kept.values():
            each.started(_START)
        return kept

    def _start(
        self, side: str, spec: Spec, device: Sequence[str], running: contextlib.ExitStack
    ) -> Kept:
        """Start a side's engine."""
        work, (base, _, switch) = self.installations.work, side.partition("=")
        self._count += 1
        out, caches = work / f"{side}-{self._count}.json", work / f"{side}-compiled"
        environment = {
            **self.environment,
            **{name: str(caches / name.lower()) for name in CACHES[1:]},
            CACHES[0]: str(caches),
            "VLLM_USE_V2_MODEL_RUNNER": str(int(base == "mrv2")),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not self.args.steps)),
            **({"CUDA_VISIBLE_DEVICES": device[0]} if device else {}),
            **({"VLLM_READINESS": switch} if switch else {}),
        }
        command = ["-m", "bench.loops.child", str(out), json.dumps(spec._asdict())]
        self._logs.append(out.with_suffix(".log"))
        process = self.installations.start(
            _ORIGINS.get(base, _OVERLAID), command, self._logs[-1], environment, [self._plugin]
        )
        running.push(lambda error, *_: _end(process, 0.0 if error else _END))
        return Kept(process, out)

    def _slice(
        self, job: Job, start: Start, order: int, case: str, kept: Mapping[str, Kept]
    ) -> None:
        """Measure a slice on both sides; keep, write and print its figures."""
        answers, together = {}, self.args.places == 2
        sides = start.sides[::-1] if order else start.sides
        for seconds in (0.0, self.args.seconds):  # the warm-up, and then the slice
            for group in (sides,) if together else ((side,) for side in sides):
                for side in group:
                    kept[side].ask()
                for side in group:
                    answers[side] = kept[side].result(seconds + _SLICE)
        self.device = answers[sides[0]]["device"]
        figures = {side: answers[side]["figures"] for side in start.sides}
        labels = {"round": job.round, "order": order, "engine": start.about, "case": case}
        self.rounds.append({**labels, "sides": list(start.sides), "figures": figures})
        self.write(complete=False)
        spent = time.monotonic() - self._started
        shown = tables.told(figures, start.sides)
        print(f"{spent:.0f} s, {job.name}.{order + 1}, {case}: {shown}", flush=True)

    def table(self) -> dict[str, Any]:
        """Return the table of all slices."""
        how = "at the same time" if self.args.places == 2 else "in turns"
        return tables.table(self.rounds, f"{self.args.seconds:g} s each, both sides {how}")


def starts(args: argparse.Namespace) -> Iterator[Start]:
    """Yield the starts of a round: pairs in the order given, the engines of each.

    Rows and engines that Model Runner V2 does not support are left out of its pairs.
    """
    chosen: dict[str, list[str]] = {}
    for shape in args.shapes:
        chosen.setdefault(SHAPES[shape].engine, []).append(shape)
    for pair in args.pairs:
        first, second = pair.split("/")
        for name, shapes in chosen.items():
            engine = ENGINES[name]
            for thinking in (False, True):
                rows = args.rows or engine.rows
                of = [row for row in rows if ROWS[row].thinking == thinking]
                unsupported = "mrv2" in (first, second) and (thinking or not engine.mrv2)
                if of and not unsupported:
                    cases = tuple((shape, row) for shape in shapes for row in of)
                    for graphs in args.graphs:
                        yield Start(name, graphs, thinking, (first, second), cases)


def cores(places: int) -> list[list[int]]:
    """Divide the CPUs among places, so that the threads of a core stay together."""

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


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Let an engine end by itself after its last slice; kill what is left of it."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:
        end(process)


def _pair(text: str) -> str:
    if not re.fullmatch(f"({_SIDE})/(?!\\1$)({_SIDE})", text):
        names = ", ".join((*_ORIGINS, _OVERLAID))
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pair; give A/B of {names}, or {_OVERLAID}=VALUE (of VLLM_READINESS)"
        )
    return text


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.compare.run.run`."""
    devices = gpus() if Path("/dev/nvidiactl").exists() else []
    options = command_line.parser(__doc__ or "", rounds=5)
    usual = [pair for pair in PAIRS if devices or "mrv2" not in pair]
    text = "sides to compare, of stock, again, copy, mrv2, overlaid and overlaid=VALUE"
    options.add_argument("--pairs", nargs="+", type=_pair, metavar="A/B", default=usual, help=text)
    large = [shape for shape in SHAPES if SHAPES[shape].engine not in ("small", "tiny")]
    shapes = large if devices else ["small-8"]
    options.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=shapes)
    options.add_argument("--rows", nargs="+", choices=list(ROWS), help="(the shape's own)")
    graphs = ["piecewise", "full"] if devices else ["none"]
    options.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=graphs)
    text = "seconds of each slice (%(default)s), without its warm-up"
    options.add_argument("--seconds", type=float, default=8.0, help=text)
    text = "1: the sides take turns; 2: at the same time, on halves of the cores (%(default)s)"
    places = min(2, max(1, len(devices)))
    options.add_argument("--places", type=int, choices=(1, 2), default=places, help=text)
    text = "time the host's work by kind of step instead, with the engine in the process"
    options.add_argument("--steps", action="store_true", help=text)
    command_line.add_limit(options)
    args = command_line.parse(options, argv)
    args.gpus = devices
    return run(args, lambda installations: TrafficRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
