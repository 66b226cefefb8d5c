"""Measure what the fixes cost the host in a decode step that meets none of them.

    PYTHONPATH=scripts python -m bench.fixes [--site SITE] [--batch N] [--steps N] ...

Three overlaid engines take their steps by turns in one process: two with everything on, and one
with VLLM_READINESS=-fixes. The difference of the first two is noise. What is timed is the host's
work in the scheduler and the runner, without the model's forward and its logits. The engines must
return the same tokens. Each round is a new process, which makes the engines in the opposite order
of the one before: take an even number. DIR gets run.json, run.md and run.html.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from overlay import output

from bench.compare import command_line
from bench.compare.installations import Installations
from bench.compare.intervals import LEAST, of_differences
from bench.compare.run import Job, run
from bench.compare.summary import CaseResult
from bench.compare.table_run import TableRun
from bench.engine import IN_ONE_PROCESS
from bench.host_work import ENGINES, Load
from bench.reports.claims import FEW, NOISE, marked

#: Seconds for a round.
TIMEOUT = 900.0


class FixesRun(TableRun):
    """A run of rounds, in each of which every engine is measured."""

    #: One thread for the host's own tensors: on few cores, threads wait for one another.
    environment: Mapping[str, str] = {
        **IN_ONE_PROCESS,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    columns = ("part", "fixes off", "fixes on", "cost of the fixes", "noise")
    texts = 1

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations, {})
        self.load = Load(args.batch, args.steps)
        self.rounds: list[Mapping[str, Any]] = []

    def jobs(self) -> list[Job]:
        """Return a job for each round."""
        return [Job("fixes", "overlaid", turn + 1) for turn in range(self.args.rounds)]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure every engine in one process.

        Raises:
            Failure: the process failed.
        """
        load = self.load._replace(reverse=job.round % 2 == 0)
        module = ["bench.host_work", json.dumps(load._asdict())]
        self.rounds.append(self.child(job.name, job.side, module, {}, TIMEOUT))
        self.device = self.rounds[-1]["device"]
        return {}

    def table(self) -> dict[str, Any]:
        """Return a table of one row for each part of a step."""
        count = len(self.rounds)
        fixes = ", ".join(self.rounds[0]["fixes"]["on"]) if count else "none"
        shape = f"{self.load.batch} plain greedy rows, {self.load.steps} steps"
        return {
            "title": f"The host's microseconds in a decode step, by turns in one process: {shape}, "
            f"{count} round{'s' * (count != 1)}; medians. Fixes: {fixes}.",
            "note": "The cost is on minus off, the noise is the same of two engines with the fixes "
            f"on. {NOISE} marks a cost that cannot be told from it, {FEW} one of fewer "
            f"than {LEAST} rounds. Without the model's forward and its logits.",
            "rows": rows(self.rounds),
            "problems": problems(self.rounds),
        }


def rows(rounds: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return a row for each part: medians over the rounds, a cost that may be noise marked so."""
    table = []
    parts = rounds[0]["parts"] if rounds else {}
    for part in parts:
        seen = {
            figure: [one["parts"][part][figure] for one in rounds]
            for figure in (*ENGINES, "cost", "noise")
        }
        median = {figure: statistics.median(values) for figure, values in seen.items()}
        beyond = [one - other for one, other in zip(seen["cost"], seen["noise"], strict=True)]
        cost = marked(median["cost"], of_differences(beyond, len(parts)), equal=0.0)
        table.append([part, median["off"], median["on"], cost, median["noise"]])
    return table


def problems(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what makes the figures worthless: other tokens, or a switch that was not obeyed."""
    texts = []
    for number, one in enumerate(rounds, 1):
        if len({*one["tokens"].values()}) > 1:
            texts.append(f"round {number}: the engines returned different tokens")
        if one["fixes"]["off"] or not one["fixes"]["on"]:
            texts.append(f"round {number}: the switch was not obeyed")
    return texts


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.compare.run.run`."""
    options = command_line.parser(__doc__ or "", rounds=6)
    options.add_argument("--batch", type=int, default=128, help="requests (%(default)s)")
    options.add_argument("--steps", type=int, default=256, help="of each round (%(default)s)")
    args = command_line.parse(options, argv)
    return run(args, lambda installations: FixesRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
