"""Runs of pairs: two sides at a time, which exchange places.

With two GPUs both sides run at the same time, each with a GPU and half of the cores, and then
exchange places: each side has an engine in both places. With one GPU they take turns, in both
orders. Engines stay started through all rounds of their pair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.errors import Failure
from bench.harness import command_line, disturbance, outputs
from bench.harness.installations import Installations, end, log_tail
from bench.harness.kept import Kept
from bench.harness.machine import gpus
from bench.harness.run import Job, Run
from bench.results.slices import DISTURBANCE

#: Side to the installation that it imports; "again" is stock, "copy" another view of stock, and
#: "probed" the overlay with the probe on.
ORIGINS = {
    **{"stock": "stock", "again": "stock", "copy": "copy", "mrv2": "stock"},
    **{"overlaid-mrv2": "overlaid", "probed": "overlaid"},
}
_OVERLAID = "overlaid"
_SIDE = rf"{'|'.join(ORIGINS)}|{_OVERLAID}(?:=[^/]+)?"
#: Seconds for an engine to start, for a slice to end beyond its own time, and for an engine to end.
#: A hybrid model's kernels compile for minutes.
_START, _SLICE, _END = 400.0, 240.0, 30.0


class Start(NamedTuple):
    """Engines that are started together.

    Attributes:
        about: engine and graphs, for the report.
        sides: the two that are compared.
        cases: label of each case to the child's argument for it.
        settings: for the child.
    """

    about: str
    sides: tuple[str, str]
    cases: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Engine, graphs and sides."""
        return f"{self.about}, {'/'.join(self.sides)}"


class PairRun(Run):
    """A run of rounds; in each, each pair of sides is measured in both orders.

    Attributes:
        module: of the child, which is given an output file and a JSON object: the start's
            "settings", the "cores", and the share of GPU "memory". A request is a case's argument
            and a seed, and is sent twice: for the warm-up, and for the slice.
        caches: variables of directories for whatever a side compiles.
    """

    module: ClassVar[str]
    caches: ClassVar[Sequence[str]] = ()

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations)
        self._starts = {start.name: start for start in self.starts()}
        self.groups = [
            (start.about, label, start.sides)
            for start in self._starts.values()
            for label in start.cases
        ]
        if any("copy" in start.sides for start in self._starts.values()):
            installations.add_copy()
        self._count, self._logs = 0, list[Path]()
        self._started_for, self._kept = "", dict[tuple[str, int], Kept]()
        self._failed: set[str] = set()

    @abstractmethod
    def starts(self) -> Sequence[Start]:
        """Return the starts of a round, in order."""

    def variables(self, side: str) -> Mapping[str, str]:
        """Return the variables of a side's processes, in addition to the run's."""
        base, _, switch = side.partition("=")
        return {
            "VLLM_USE_V2_MODEL_RUNNER": str(int(base.endswith("mrv2"))),
            **({"VLLM_READINESS": switch} if switch else {}),
        }

    def origin(self, side: str) -> str:
        """Return the installation that a side's child imports."""
        return origin(side)

    def spec(self, side: str) -> Mapping[str, Any]:
        """Return further keys of the child's JSON object."""
        del side
        return {}

    def paths(self) -> Sequence[Path]:
        """Return further entries of the child's path."""
        return ()

    def jobs(self) -> list[Job]:
        """Return a job for each round of each start."""
        rounds = range(1, self.args.rounds + 1)
        return [Job(name, number) for name in self._starts for number in rounds]

    def measure(self, job: Job) -> None:
        """Measure two sides in both orders.

        Raises:
            Failure: a process failed, or took too long; its log is kept.
            Fatal: a side's answer is an error.
        """
        start = self._starts[job.name]
        if job.name in self._failed:
            raise Failure(f"{job}: its engines did not start")
        try:
            if self._started_for != job.name:
                self._failed.add(job.name)
                self._begin(start)
                self._failed.remove(job.name)
            for label in start.cases:
                for order in (0, 1):
                    self._slice(job, start, order, label)
        except Failure as error:
            self._started_for = ""
            tails = [f"{shutil.copy(log, self.args.out)}:\n{log_tail(log)}" for log in self._logs]
            with self.running:
                raise type(error)("\n".join([f"{job}: {error}", *tails])) from error

    def _begin(self, start: Start) -> None:
        """Start the engines of both sides in each place; the engines of the former start end."""
        self.running.close()
        self._started_for, self._logs, self._kept = start.name, [], {}
        share = len(self.args.gpus) // self.args.places
        for place, own_cores in enumerate(cores(self.args.places)):
            devices = self.args.gpus[place * share :][:share]
            for side in start.sides:
                # Of the GPU's memory, the engines of both sides have 0.4 each.
                own = {"cores": own_cores, "memory": 0.4, **self.spec(side)}
                spec = {**start.settings, **own}
                self._kept[side, place] = self._start(f"{side}-{place}", side, spec, devices)
        for each in self._kept.values():
            each.started(_START)
        self.started()
        for each in self._kept.values():
            self.running.callback(each.ask, None)  # all are asked to end before one is waited for

    def _start(self, name: str, side: str, spec: Mapping[str, Any], devices: Sequence[str]) -> Kept:
        """Start a side's engine, which ends with ``self.running``.

        Args:
            name: for its files.
            side: of the pair.
            spec: for the child.
            devices: GPUs.
        """
        work = self.installations.work
        self._count += 1
        out, caches = work / f"{name}-{self._count}.json", work / f"{name}-compiled"
        environment = {
            **self.environment,
            **{
                name: str(caches / (name.lower() if n else ""))
                for n, name in enumerate(self.caches)
            },
            **self.variables(side),
            **(
                {"VLLM_READINESS_PROBE": str(out.with_suffix(".probe"))} if side == "probed" else {}
            ),
            **({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}),
        }
        self._logs.append(out.with_suffix(".log"))
        command = ["-m", self.module, str(out), json.dumps(spec)]
        process = self.installations.start(
            self.origin(side), command, self._logs[-1], environment, self.paths()
        )
        self.running.push(lambda error, *_: _end(process, 0.0 if error else _END))
        return Kept(process, out)

    def _slice(self, job: Job, start: Start, order: int, label: str) -> None:
        """Measure a slice on both sides, compare their outputs, and keep it."""
        answers: dict[str, dict[str, Any]] = {}
        together = self.args.places == 2
        sides = start.sides[::-1] if order else start.sides
        kept = {side: self._kept[side, n * together] for n, side in enumerate(sides)}
        request = (start.cases[label], 2 * job.round + order)
        for seconds in (0.0, self.args.seconds):  # the warm-up, and then the slice
            for group in (sides,) if together else ((side,) for side in sides):
                for side in group:
                    kept[side].ask(request)
                for side in group:
                    answers[side] = kept[side].result(seconds + _SLICE)
        self.device = answers[sides[0]]["device"]
        figures = {side: answers[side]["figures"] for side in start.sides}
        self.keep(
            {
                **{"round": job.round, "order": order, "engine": start.about, "case": label},
                **{"sides": list(start.sides), "figures": figures},
                "problems": problems(start.sides, answers),
                # Measured at the same time, noise meets both sides, and the rest is their own.
                "disturbed": [] if together else _disturbed(figures),
                "digests": {
                    side: {
                        kind: outputs.digest(packed)
                        for kind, packed in answers[side].get("outputs", {}).items()
                    }
                    for side in start.sides
                },
            }
        )


def origin(side: str) -> str:
    """Return the installation of a side."""
    return ORIGINS.get(side.partition("=")[0], _OVERLAID)


def problems(sides: Sequence[str], answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the problems of both answers, and where their outputs differ.

    Args:
        sides: the two.
        answers: side to the child's answer: "problems", "counts" (received and expected numbers by
            kind) and "outputs" (packed, by kind), each of which may be missing.
    """
    texts = []
    for side in sides:
        texts += [f"{side}: {text}" for text in answers[side].get("problems", ())]
        for kind, (received, expected) in answers[side].get("counts", {}).items():
            if received != expected:
                texts.append(f"{side}: {received} of {expected} {kind}")
    one, other = (answers[side].get("outputs", {}) for side in sides)
    for kind in {**one, **other}:
        where = outputs.first_difference(one.get(kind, ""), other.get(kind, ""))
        if where is not None:
            texts.append(f"{kind} of {' and '.join(sides)} differ: {where}")
    return texts


def _disturbed(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{side}: {text}"
        for side, of in figures.items()
        for text in disturbance.reasons(of.get(DISTURBANCE))
    ]


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


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Let an engine end by itself after its last slice; kill the rest."""
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    finally:
        end(process)


def pair(text: str) -> str:
    """Return a pair of sides as it was given; for argparse."""
    if not re.fullmatch(f"({_SIDE})/(?!\\1$)({_SIDE})", text):
        names = ", ".join((*ORIGINS, _OVERLAID))
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pair; give A/B of {names}, or {_OVERLAID}=VALUE (of VLLM_READINESS)"
        )
    return text


def parser(description: str, pairs: Sequence[str], rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the options of runs of pairs.

    Args:
        description: of the program, in its first line.
        pairs: by default; those of Model Runner V2 need a GPU.
        rounds: by default.
    """
    devices = visible()
    options = command_line.parser(description, rounds)
    usual = [each for each in pairs if devices or "mrv2" not in each]
    text = f"sides to compare, of {', '.join((*ORIGINS, _OVERLAID))} and {_OVERLAID}=VALUE"
    options.add_argument("--pairs", nargs="+", type=pair, metavar="A/B", default=usual, help=text)
    text = "1: the sides take turns; 2: at the same time, on halves of the cores (%(default)s)"
    places = min(2, max(1, len(devices)))
    options.add_argument("--places", type=int, choices=(1, 2), default=places, help=text)
    return options


def visible() -> list[str]:
    """Return the GPUs that vLLM may use."""
    return gpus() if Path("/dev/nvidiactl").exists() else []
