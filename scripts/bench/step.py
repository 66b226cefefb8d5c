"""Measure one feature in a sampling step, stock beside overlaid.

    PYTHONPATH=scripts python -m bench.step [--what FEATURE...] [--site SITE] [--device cuda] ...

A step does what the runner does for the feature under async scheduling: bring the history up to
date, process the logits, record the sampled tokens. The input batch and the sampler are vLLM's
own, the logits random. Each side runs in processes of its own, by turns, and both must process
the logits alike. Times are wall-clock time a step, over steps one after the other with one
synchronization at the end. A thinking budget works on the host; its time is the host's, from the
beginning of a step until its logits are processed. DIR gets run.json, run.md and run.html.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from overlay import output

from bench.compare import command_line, outputs
from bench.compare.installations import SIDES, Installations
from bench.compare.run import WITHOUT_FIXES, Job, Run, Table, measured_sides, run
from bench.compare.summary import CaseResult
from bench.sampling_step import FEATURES, Load

#: Feature to the name of its time.
FIGURES = {"penalties": "step", "thinking": "the host's part of a step"}
#: Seconds for a side in a round.
TIMEOUT = 900.0


class StepRun(Run):
    """A run of features, a table each."""

    environment = WITHOUT_FIXES

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        self.load = Load(*(getattr(args, name) for name in Load._fields))
        shape = f"batch {args.batch}, vocabulary {args.vocab:,}, {args.steps} steps"
        tables = {
            name: Table(
                measured_sides(SIDES, args),
                {"title": "One step, on random logits.", "shape": shape},
                self.load.cases(name),
                "step",
            )
            for name in args.what
        }
        super().__init__(args, installations, tables)

    def measure(self, job: Job) -> Mapping[str, Mapping[str, CaseResult]]:
        """Measure every feature on one side.

        Raises:
            Failure: its process failed.
        """
        module = ["bench.sampling_step", json.dumps(self.load._asdict())]
        measured = self.child(job.name, job.side, module, {}, TIMEOUT)
        self.device = measured["device"]
        return {
            feature: {
                name: CaseResult(
                    {FIGURES[feature]: case["ms"]},
                    {"logits": outputs.pack([case["logits"]])},
                    disturbance=case["disturbance"],
                )
                for name, case in results.items()
            }
            for feature, results in measured["results"].items()
        }


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables; see :func:`bench.compare.run.run`."""
    options = command_line.parser(__doc__ or "", rounds=5)
    command_line.add_again(options)
    options.add_argument("--what", nargs="+", choices=list(FEATURES), default=["penalties"])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--batch", type=int, default=16, help="requests (%(default)s)")
    options.add_argument("--vocab", type=int, default=151936, help="tokens (%(default)s)")
    options.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 12288])
    options.add_argument("--steps", type=int, default=10, help="of each length (%(default)s)")
    args = command_line.parse(options, argv)
    return run(args, lambda installations: StepRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
