"""Measure the host's work in a step: stock, overlaid and Model Runner V2 in one process.

    PYTHONPATH=scripts python -m bench.host [--site SITE] [--kinds KIND...] [--batches N...] ...

A process makes an engine on stock's runner, one on the overlaid runner, one on stock's Model Runner
V2 (on a GPU, without drafts), and another on stock's. Scheduler and engine core are the overlaid
ones in all. They take the same steps by turns, and a ratio is that of two engines' quantiles over
these steps. The device is waited for between the turns. The two stock engines differ by noise
alone. Each round is a new process, which makes the engines in the opposite order of the one before:
take an even number. DIR gets run.json, run.md and run.html, anew after each batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.compare import command_line
from bench.compare.installations import Installations
from bench.compare.intervals import LEAST, interval
from bench.compare.run import Job, run
from bench.compare.summary import CaseResult
from bench.compare.table_run import TableRun
from bench.engine import IN_ONE_PROCESS
from bench.reports.claims import FEW, NOISE, marked
from bench.runners.cases import KINDS, SIDES, SIZES, WARMUP, Load
from bench.runners.figures import QUANTILES, RATIOS

#: Seconds for a process.
TIMEOUT = 600.0
_ENGINES = ("stock", "overlaid", "mrv2")
#: Version of the runner to an object of it, and the file that its class must be of.
_FILES = {
    1: {
        "runner": "vllm/v1/worker/gpu_model_runner.py",
        "input_batch": "vllm/v1/worker/gpu_input_batch.py",
    },
    2: {"runner": "vllm/v1/worker/gpu/model_runner.py"},
}
_CALLED = ("execute_model", "sample_tokens")
_NOTE = (
    "Each figure is the median over the rounds, and each ratio that of two figures of its row; "
    f"{NOISE} marks one whose interval over the rounds includes 1 (Student's, corrected for the "
    "number of the table's ratios), or that is no further from 1 than the ratio of the two stock "
    f"engines is in some round, {FEW} another of fewer than {LEAST} rounds, too few for a claim; "
    "CUDA calls are counted in one round. Times are "
    "without the model's forward and its logits. Model Runner V2's "
    "`_update_states` is finish, free, add and update requests, its `_build_attention_metadata` "
    "also gathers block tables and computes slot mappings, which is a part of V1's "
    "`_prepare_inputs`. Under sync scheduling and with ngram, `sample_tokens` waits for the "
    "sampled tokens. 1k and 128k are the model's length, which gives the block table its width; "
    "the texts are short. run.json holds the files and digests of each engine's classes."
)


class HostRun(TableRun):
    """A run of rounds, in each of which every engine takes every step."""

    #: One thread for the host's own tensors: on few cores, threads wait for one another.
    environment: Mapping[str, str] = {
        **IN_ONE_PROCESS,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    columns = ("case", "figure", *_ENGINES, *RATIOS)
    texts = 2

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations, {})
        self.rounds: dict[str, Mapping[str, Any]] = {}
        self._left_out: list[str] = []

    def jobs(self) -> list[Job]:
        """Return the jobs in order: every round of the first kind, then the others by rounds."""
        first, *others = self.args.kinds
        rounds = range(1, self.args.rounds + 1)
        kinds = [*((first, n) for n in rounds), *((kind, n) for n in rounds for kind in others)]
        return [Job(kind, "overlaid", n) for kind, n in kinds]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure every engine in one process; results of a process that fails are kept.

        Raises:
            Failure: it failed.
        """
        args = self.args
        load = Load(
            kind=job.group,
            size=args.size,
            batches=args.batches,
            steps=args.steps,
            stock=str(self.installations.paths["stock"][0]),
            reverse=job.round % 2 == 0,
            calls=job.round == 1,
        )
        module = ["bench.runners.child", json.dumps(load._asdict())]
        try:
            self.child(job.name, job.side, module, {}, TIMEOUT, watch=lambda: self._take(job))
        finally:
            self._take(job)
        return {}

    def leave_out(self, job: Job) -> None:
        """Take note of it for the table."""
        self._left_out.append(job.name.replace(", overlaid", ""))

    def _take(self, job: Job) -> None:
        """Write what a process has measured by now, if that is more than before."""
        out: Path = self.out(job.name)
        if out.exists() and (text := out.read_text()):
            taken = json.loads(text)
            if taken != self.rounds.get(job.name):
                self.rounds[job.name], self.device = taken, taken["device"]
                self.write(complete=False)

    def table(self) -> dict[str, Any]:
        """Return a table of two rows for each part of a step."""
        rounds = list(self.rounds.values())
        left = f" Left out for lack of time: {'; '.join(self._left_out)}." * bool(self._left_out)
        skipped = sorted({name for one in rounds for name in {*SIDES} - {*one["proof"]}})
        missing = f" Without {', '.join(skipped)} where the table has -." * bool(skipped)
        return {
            "title": "The host's microseconds in a step, by turns in one process: "
            f"{self.args.size} shape, {self.args.steps} steps of each batch and round, "
            f"up to {self.args.rounds} rounds.",
            "note": _NOTE + missing + left,
            "rows": rows(rounds),
            "problems": problems(self.rounds),
        }


def rows(rounds: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of the table: of each case, quantiles of each part, and CUDA calls.

    Args:
        rounds: results of processes.
    """
    seen: dict[str, list[Mapping[str, Any]]] = {}
    for one in rounds:
        for name, case in one["cases"].items():
            seen.setdefault(f"{one['kind']}, {name}", []).append(case)
    table = []
    shown = sum(len(cases[0]["parts"]) for cases in seen.values()) * len(QUANTILES)
    claims = shown * (len(RATIOS) - 1)
    for name, cases in seen.items():
        for part in cases[0]["parts"]:
            for quantile in QUANTILES:
                of_rounds = [
                    {engine: of[quantile] for engine, of in case["parts"][part].items()}
                    for case in cases
                ]
                table.append([name, f"{part} {quantile}", *_cells(of_rounds, claims)])
        called = [case["calls"] for case in cases if "calls" in case]
        table += [[name, *cells] for cells in _call_rows(called, claims)]
    return table


def _cells(rounds: Sequence[Mapping[str, float]], claims: int) -> Iterator[Any]:
    """Yield each engine's median, and the ratios of these, marked where they may be noise.

    Args:
        rounds: of each round, engine to its figure.
        claims: ratios that are shown together.
    """
    medians = {
        engine: statistics.median(values)
        for engine in SIDES
        if (values := [of[engine] for of in rounds if engine in of])
    }
    yield from (medians.get(engine) for engine in _ENGINES)
    paired = {
        name: [of[one] / of[other] for of in rounds if of.get(one) and of.get(other)]
        for name, (one, other) in RATIOS.items()
    }
    again = list(RATIOS)[-1]
    noise = max((abs(ratio - 1) for ratio in paired[again]), default=0.0)
    for name, (one, other) in RATIOS.items():
        if one not in medians or not medians.get(other):
            yield None
            continue
        ratio = medians[one] / medians[other]
        if name == again:
            yield ratio
        elif any(abs(each - 1) <= noise for each in paired[name]):
            yield [ratio, NOISE]
        else:
            yield marked(ratio, interval([[each] for each in paired[name]], claims))


def _call_rows(called: Sequence[Mapping[str, Any]], claims: int) -> Iterator[list[Any]]:
    """Yield the rows of CUDA calls: the figure, each engine, and each ratio."""
    for part in _CALLED:
        for kind, unit in (("calls", "a step"), ("us", "us")):
            rounds = [
                {engine: one[key][kind] for engine in SIDES if (key := f"{engine}: {part}") in one}
                for one in called
            ]
            if any(rounds):
                yield [f"CUDA calls in {part}, {unit}", *_cells(rounds, claims)]


def problems(rounds: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what makes the figures worthless: other tokens, or an engine of other classes.

    Args:
        rounds: name of a process to its results.
    """
    texts = []
    for name, one in rounds.items():
        texts += [f"{name}, without {side}: {why}" for side, why in one["failed"].items()]
        for label, case in one["cases"].items():
            same = {case["tokens"][side] for side in case["tokens"] if SIDES[side].version == 1}
            if len(same) > 1:
                texts.append(f"{name}, {label}: stock and overlaid returned different tokens")
        for side, proof in one["proof"].items():
            texts += [f"{name}: {text}" for text in unproven(side, proof)]
            if one["async"][side] != KINDS[one["kind"]].asynchronous:
                texts.append(f"{name}: {side} does not schedule as it should")
        for twin in one["twins"]:
            if twin["state"] in ("overlaid", "foreign"):
                texts.append(f"{name}: {twin['path']} is {twin['state']}, not stock's")
    return texts


def unproven(side: str, proof: Mapping[str, Any]) -> list[str]:
    """Return why an engine is not proven to run the classes of its side.

    Args:
        side: its name.
        proof: see :meth:`bench.runners.engine.Engine.proof`.
    """
    stock = SIDES[side].stock
    wanted = "pristine" if stock else "overlaid"
    texts = [
        f"{side}'s {one} has {cls['class']} of {cls['path']}, which is {cls['state']}"
        for one, classes in proof["classes"].items()
        for cls in classes
        if cls["state"] not in (wanted, "not changed") or cls["of"] == "elsewhere"
    ]
    for one, path in _FILES[SIDES[side].version].items():
        files = {cls["path"]: cls["state"] for cls in proof["classes"].get(one, [])}
        if files.get(path) != wanted:
            texts.append(f"{side}'s {one} is not of the {wanted} {path}")
    if stock and proof["readiness"]:
        texts.append(f"{side}'s {', '.join(proof['readiness'])} carries the overlay")
    if not stock and "input_batch" not in proof["readiness"]:
        texts.append(f"{side}'s input_batch does not carry the overlay")
    return texts


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.compare.run.run`."""
    gpu = Path("/dev/nvidiactl").exists()
    usual = [kind for kind in KINDS if kind != "sync 128k"] if gpu else ["sync 1k"]
    there = [name for name, kind in KINDS.items() if gpu or not kind.asynchronous]
    options = command_line.parser(__doc__ or "", rounds=2)
    options.add_argument("--kinds", nargs="+", choices=there, default=usual)
    options.add_argument("--batches", nargs="+", type=int, default=None, help="requests at a time")
    options.add_argument("--size", choices=list(SIZES), default="0.5B" if gpu else "tiny")
    options.add_argument("--steps", type=int, default=200, help="of each batch (%(default)s)")
    command_line.add_limit(options, 480.0 if gpu else None)
    args = command_line.parse(options, argv)
    args.batches = args.batches or ([128, 1, 8, 256, 32] if gpu else [64, 1, 8])
    if args.steps < 2 or WARMUP + args.steps > 240:  # drafts in a model's length of 1,024
        options.error(f"--steps {args.steps}: give 2 to {240 - WARMUP}")
    if min(args.batches) < 1:
        options.error(f"--batches {min(args.batches)}: give 1 or more")
    return run(args, lambda installations: HostRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
