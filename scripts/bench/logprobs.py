"""Measure what logprobs cost the host behind the sampler: the feature off and on.

    PYTHONPATH=scripts python -m bench.logprobs [--site SITE] [--batch N] [--steps N] ...

A step's logprobs go from tensors on the host to the client: they are sliced for each request,
written into the engine core's message, read, and processed by the front end. The classes are
vLLM's own, the values random; no model runs. Two sides have the feature off and differ by noise
alone. In each round, a process of its own, the sides take all steps of a case one after the other,
in another order than in the round before. They must give clients the same. The collector is left
as Python sets it. DIR gets run.json, run.md and run.html.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from overlay import output

from bench.compare import command_line
from bench.compare.installations import Installations
from bench.compare.intervals import LEAST, interval
from bench.compare.run import Job, run
from bench.compare.summary import CaseResult
from bench.compare.table_run import TableRun
from bench.logprob_work import PARTS, SIDES, TOGETHER, Load
from bench.reports.claims import FEW, NOISE, marked

#: Seconds for a round.
TIMEOUT = 1800.0
#: Figures by title, and where a side's results hold them.
_SHOWN: Mapping[str, tuple[str, ...]] = {
    **{f"{part}, p50": ("parts", part, "p50") for part in (*PARTS, TOGETHER)},
    # What is put off to a request's end shows in the mean alone.
    f"{TOGETHER}, mean": ("parts", TOGETHER, "mean"),
    f"{TOGETHER}, p99": ("parts", TOGETHER, "p99"),
    "longest pause": ("pauses", "longest"),
    "collection, a step": ("pauses", "a step"),
}


class LogprobsRun(TableRun):
    """A run of rounds, in each of which every side is measured."""

    #: One thread for the host's own tensors: on few cores, threads wait for one another.
    environment: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
    columns = ("case", "milliseconds", *SIDES, "on / off", "off again / off")
    texts = 2

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        super().__init__(args, installations, {})
        self.load = Load(args.batch, args.steps, args.output, args.logprobs)
        self.rounds: list[Mapping[str, Any]] = []

    def jobs(self) -> list[Job]:
        """Return a job for each round."""
        return [Job("logprobs", "overlaid", turn + 1) for turn in range(self.args.rounds)]

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure every side in one process.

        Raises:
            Failure: the process failed.
        """
        load = self.load._replace(turn=job.round)
        module = ["bench.logprob_work", json.dumps(load._asdict())]
        self.rounds.append(self.child(job.name, job.side, module, {}, TIMEOUT))
        return {}

    def table(self) -> dict[str, Any]:
        """Return a table of each case's parts and pauses."""
        load, count = self.load, len(self.rounds)
        return {
            "title": f"The host's milliseconds for a step's logprobs: {load.batch} requests of "
            f"{load.output} tokens, {load.steps} steps, {count} round{'s' * (count != 1)}; medians "
            "of the rounds.",
            "note": "Pauses are collections of the oldest generation: the longest of a round. "
            "Collection is the time of all generations, over all steps. "
            f"{NOISE} marks a ratio whose interval over the rounds includes 1 (Student's, "
            f"corrected for the number of ratios), {FEW} one of fewer than {LEAST} rounds.",
            "rows": rows(self.rounds),
            "problems": problems(self.rounds),
        }


def rows(rounds: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of each case: medians over the rounds."""
    table = []
    cases = rounds[0]["cases"] if rounds else ()
    claims = 2 * len(_SHOWN) * len(cases)
    for case in cases:
        sides = [one["cases"][case] for one in rounds]
        for title, path in _SHOWN.items():
            median = {
                side: statistics.median(_at(one[side], path) for one in sides) for side in SIDES
            }
            ratios = [
                _ratio([(_at(one[side], path), _at(one["off"], path)) for one in sides], claims)
                for side in ("on", "off again")
            ]
            table.append([case, title, *median.values(), *ratios])
    return table


def _ratio(pairs: Sequence[tuple[float, float]], claims: int) -> Any:
    """Return the ratio of two sides' medians, with its mark if the rounds do not tell them apart.

    Args:
        pairs: of each round, the side's figure and the other's.
        claims: ratios that are shown together.
    """
    if not all(one > 0 and other > 0 for one, other in pairs):
        return "-"
    ratio = operator.truediv(*(statistics.median(side) for side in zip(*pairs, strict=True)))
    return marked(ratio, interval([[one / other] for one, other in pairs], claims))


def _at(values: Any, path: Sequence[str]) -> float:
    for name in path:
        values = values[name]
    return float(values)


def problems(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what makes the figures worthless: other outputs, or a switch that was not obeyed."""
    texts = []
    for number, one in enumerate(rounds, 1):
        for case, sides in one["cases"].items():
            if len({side["digest"] for side in sides.values()}) > 1:
                texts.append(f"round {number}, {case}: clients were given different logprobs")
            kinds = [side["processor"] for side in sides.values()]
            if kinds != ["LogprobsProcessor", "LogprobsProcessor", "DeferredLogprobs"]:
                texts.append(f"round {number}, {case}: the switch was not obeyed")
    return texts


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.compare.run.run`."""
    options = command_line.parser(__doc__ or "", rounds=5)
    options.add_argument("--batch", type=int, default=128, help="requests (%(default)s)")
    options.add_argument("--steps", type=int, default=600, help="of each side (%(default)s)")
    options.add_argument("--output", type=int, default=512, help="tokens a request (%(default)s)")
    options.add_argument("--logprobs", type=int, nargs="+", default=[5, 20], metavar="N")
    args = command_line.parse(options, argv)
    return run(args, lambda installations: LogprobsRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
