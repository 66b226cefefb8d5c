"""Measure the host's work in a step: stock, overlaid and Model Runner V2 in one process.

    PYTHONPATH=scripts python -m bench.host [--site SITE] [--kinds KIND...] [--batches N...] ...

A process makes an engine on stock's runner, one on the overlaid runner, one on stock's Model Runner
V2 (on a GPU, without drafts), and another on stock's. Scheduler and engine core are the overlaid
ones in all. Their steps are interleaved, and the device is waited for between the turns. "again" is
the other engine on stock's runner, and differs by noise alone. A round is two processes, which make
the engines in opposite orders. The kinds "scheduler N" time the scheduler alone, on the CPU, with N
requests in flight. DIR gets manifest.json, run.json and run.md, written again after each process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.harness import command_line
from bench.harness.installations import Installations
from bench.harness.run import Job, Run, run
from bench.runners import scheduler
from bench.runners.cases import KINDS, SIDES, SIZES, WARMUP, Load

#: Seconds for a process.
TIMEOUT = 600.0
#: First side, and the one that it is compared with.
PAIRS = (("again", "stock"), ("overlaid", "stock"), ("overlaid", "mrv2"))
SCHEDULERS: Mapping[str, int] = {f"scheduler {n}": n for n in (32, 128, 256, 512)}
_TITLE = (
    "The host's microseconds in a step, interleaved in one process: {size} shape, {steps} steps of "
    "each batch and process. Times are without the model's forward and its logits. Model Runner "
    "V2's `_update_states` is finish, free, add and update requests, its "
    "`_build_attention_metadata` also gathers block tables and computes slot mappings, which is a "
    "part of V1's `_prepare_inputs`. Under sync scheduling and with ngram, `sample_tokens` waits "
    "for the sampled tokens. 1k and 128k are the model's length, which gives the block table its "
    "width; the texts are short. Of a scheduler, stock is the overlaid class with its features off."
)


class HostRun(Run):
    """A run of processes, each of which measures every side."""

    #: One thread for the host's own tensors: on few cores, threads wait for one another.
    environment: Mapping[str, str] = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations)
        self.title = _TITLE.format(size=args.size, steps=args.steps)
        for kind in args.kinds:
            cases, sides = ["steps"], tuple(scheduler.SIDES)
            if kind not in SCHEDULERS:
                cases = [case.name for case in self._load(kind).cases]
                sides = KINDS[kind].sides(args.gpu)
            pairs = [pair for pair in PAIRS if {*pair} <= {*sides}]
            self.groups = [*self.groups, *((kind, case, pair) for case in cases for pair in pairs)]

    def _load(self, kind: str, reverse: bool = False) -> Load:
        args = self.args
        stock = str(self.installations.paths["stock"][0])
        return Load(kind, args.size, args.batches, args.steps, stock, reverse)

    def jobs(self) -> list[Job]:
        """Return a job for each kind in each round."""
        rounds = range(1, self.args.rounds + 1)
        return [Job(kind, number) for number in rounds for kind in self.args.kinds]

    def measure(self, job: Job) -> None:
        """Measure every side in two processes.

        Raises:
            Failure: one failed; the cases that it has measured are kept.
        """
        for order in (0, 1):
            name = f"{job.name}-{job.round}-{order}"
            if job.name in SCHEDULERS:
                work = scheduler.Load(SCHEDULERS[job.name], 10 * self.args.steps, bool(order))
                module = ["bench.runners.scheduler", json.dumps(work._asdict())]
                result = self.child(name, "overlaid", module, {}, TIMEOUT)
                for one in _of_schedulers(job, order, result):
                    self.keep(one)
                continue
            load = self._load(job.name, reverse=bool(order))
            module = ["bench.runners.child", json.dumps(load._asdict())]
            try:
                self.child(name, "overlaid", module, {}, TIMEOUT)
            finally:
                self._take(job, order, self.out(name))

    def _take(self, job: Job, order: int, out: Path) -> None:
        """Keep what a process has written."""
        if out.exists():
            result = json.loads(out.read_text())
            self.device = result["device"]
            self._errors += [
                f"{job}, without {side}: {why}" for side, why in result["failed"].items()
            ]
            for one in slices(job, order, result):
                self.keep(one)


def slices(job: Job, order: int, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the slices of a process: each case, and each pair of sides.

    Args:
        job: names the kind and the round.
        order: 0 or 1.
        result: the JSON of :mod:`bench.runners.child`.
    """
    for case, of in result["cases"].items():
        for sides in PAIRS:
            if all(side in result["doubts"] for side in sides):
                figures = {
                    side: {
                        f"{part} {quantile}, us": value
                        for part, engines in of["parts"].items()
                        for quantile, value in engines[side].items()
                    }
                    for side in sides
                }
                doubts = [f"{side}: {text}" for side in sides for text in result["doubts"][side]]
                problems = [*_differing(of["tokens"], sides), *doubts]
                yield _slice(job, order, case, sides, figures, problems)


def _of_schedulers(job: Job, order: int, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for sides in PAIRS[:2]:
        figures = {side: result[side]["figures"] for side in sides}
        same = len({result[side]["decisions"] for side in sides}) == 1
        problems = [] if same else [f"{' and '.join(sides)} made different decisions"]
        yield _slice(job, order, "steps", sides, figures, problems)


def _slice(
    job: Job,
    order: int,
    case: str,
    sides: tuple[str, str],
    figures: Mapping[str, Mapping[str, float]],
    problems: Sequence[str],
) -> dict[str, Any]:
    return {
        **{"round": job.round, "order": order, "engine": job.name, "case": case},
        **{"sides": list(sides), "figures": figures, "problems": list(problems), "disturbed": []},
    }


def _differing(tokens: Mapping[str, str], sides: Sequence[str]) -> list[str]:
    """Return the problem of other tokens; Model Runner V2 computes in another order."""
    if all(SIDES[side].version == 1 for side in sides) and len({tokens[s] for s in sides}) > 1:
        return [f"{' and '.join(sides)} returned different tokens"]
    return []


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.run.run`."""
    gpu = Path("/dev/nvidiactl").exists()
    usual = [kind for kind in KINDS if kind != "sync 128k"] if gpu else ["sync 1k"]
    there = [name for name, kind in KINDS.items() if gpu or not kind.asynchronous]
    options = command_line.parser(__doc__ or "", rounds=5, limit=480.0 if gpu else None)
    kinds = [*there, *SCHEDULERS]
    options.add_argument("--kinds", nargs="+", choices=kinds, default=[*usual, *SCHEDULERS])
    options.add_argument("--batches", nargs="+", type=int, default=None, help="requests at a time")
    options.add_argument("--size", choices=list(SIZES), default="0.5B" if gpu else "tiny")
    text = "of each batch (%(default)s); schedulers take ten times as many"
    options.add_argument("--steps", type=int, default=200, help=text)
    args = command_line.parse(options, argv)
    args.gpu = gpu
    args.batches = args.batches or ([128, 1, 8, 256, 32] if gpu else [64, 1, 8])
    if args.steps < 2 or WARMUP + args.steps > 240:  # drafts in a model's length of 1,024
        options.error(f"--steps {args.steps}: give 2 to {240 - WARMUP}")
    if min(args.batches) < 1:
        options.error(f"--batches {min(args.batches)}: give 1 or more")
    return run(args, lambda installations: HostRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
