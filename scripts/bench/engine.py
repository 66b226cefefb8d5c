"""Measure steady batches: all requests of a case begin and end together, and outputs are compared.

    PYTHONPATH=scripts python -m bench.engine [--site SITE] [--pairs A/B...] [--rows NAME...] ...

The engine is in the measured process. Two sides are measured at a time, and exchange places
(:mod:`bench.harness.pairs`). A pair has no ratio unless both sides returned the same tokens and
logprobs. DIR gets manifest.json, run.json and run.md, written again after each case.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.harness import command_line, pairs
from bench.harness.installations import Installations
from bench.harness.run import run
from bench.traffic import ENVIRONMENT, LoopRun, add_rows

PAIRS = ("again/stock", "overlaid/stock", "overlaid/mrv2")


class EngineRun(LoopRun):
    """A run of steady batches; by default without the fixes, which change outputs."""

    environment: Mapping[str, str] = {
        **ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_READINESS": os.environ.get("VLLM_READINESS", "-fixes"),
    }

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        self.title = f"Steady batches, {args.output} tokens for each request."
        if args.model:
            self.title += f" Model: {args.model.resolve().name}."
        super().__init__(args, installations)

    def settings(self) -> Mapping[str, Any]:
        """Return the length of the requests, the ranks and the model."""
        args = self.args
        model = str(args.model.resolve()) if args.model else ""
        return {"kind": "steady", "output": args.output, "model": model, "gpus": args.ranks}


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.run.run`."""
    devices = pairs.visible()
    options = pairs.parser(__doc__ or "", PAIRS)
    add_rows(options, devices)
    output = 256 if devices else 64
    text = "tokens of each request (%(default)s)"
    options.add_argument("--output", type=int, default=output, help=text)
    text = "GPUs of each engine, tensor parallel (%(default)s); 2 places need twice as many"
    options.add_argument("--ranks", type=int, default=1, help=text)
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    args = command_line.parse(options, argv)
    args.gpus, args.seconds = devices, 0.0
    if args.ranks > 1 and args.places * args.ranks > len(devices):
        options.error(f"--ranks {args.ranks} --places {args.places}: there are {len(devices)} GPUs")
    return run(args, lambda installations: EngineRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
