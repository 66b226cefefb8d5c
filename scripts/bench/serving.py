"""Measure serving: vLLM's server on both sides, driven by `vllm bench serve`.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--pairs A/B...] [--rounds N] ...
        [--model DIR --server "ARGUMENTS" --client "ARGUMENTS"] [--front-end rust]

Two sides are measured at a time, and exchange places (:mod:`bench.harness.pairs`). Stock's client
drives both, with our cases or with the requests that the arguments of --client make. A pair has no
ratio unless both sides returned the same. DIR gets manifest.json, run.json and run.md.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlay import output

from bench.harness import command_line, pairs
from bench.harness.installations import SCRIPTS, Installations
from bench.harness.pairs import PairRun, Start
from bench.harness.run import run
from bench.servers import load as loads
from bench.servers.load import CASES, LOADS

PAIRS = ("again/stock", "overlaid/stock", "overlaid/mrv2")


class ServingRun(PairRun):
    """A run of servers; a generated model is made once for all."""

    module = "bench.servers.child"
    environment: Mapping[str, str] = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }

    def __init__(self, args: argparse.Namespace, installations: Installations) -> None:
        load, own = LOADS[args.size], args.client
        self._model = str(args.model.resolve() if args.model else installations.work / "model")
        self.title = (
            f"`vllm serve`, driven by `vllm bench serve`: {load.requests} requests, "
            f"{load.concurrency} at a time, {load.prompt} tokens in and {load.output} out, greedy. "
            "Texts are compared whole; token ids and logprobs are those of one request alone."
        )
        # Texts depend on the batches that requests meet, unless vLLM is told otherwise.
        self._compared = own is None or os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        if own is not None:
            served = shlex.join(args.server) or "no flags"
            self.title = f"`vllm bench serve {shlex.join(own)}`, served with `{served}`. "
            self.title += f"Texts are {'' if self._compared else 'not '}compared."
        if args.front_end == "rust":
            self.title += " Both sides have the Rust front end."
        if args.model:
            self.title += f" Model: {args.model.resolve().name}."
        super().__init__(args, installations)
        if args.model is None:
            spec = json.dumps({"model": self._model, "size": args.size})
            self.child("prepare", "stock", [self.module, spec], {}, 600.0)

    def starts(self) -> Sequence[Start]:
        """Return a start for each pair."""
        args = self.args
        load = LOADS[args.size]._replace(server=(*LOADS[args.size].server, *args.server))
        settings = {
            "size": args.size,
            "model": self._model,
            "generated": args.model is None,
            "flags": loads.flags(load) if args.client is None else args.server,
            "own": args.client,
            "compared": self._compared,
            "front_end": args.front_end,
        }
        cases = {case: case for case in (args.cases if args.client is None else [loads.OWN])}
        starts = []
        for pair in args.pairs:
            first, second = pair.split("/")
            starts.append(Start("vllm serve", (first, second), cases, settings))
        return starts

    def origin(self, side: str) -> str:
        """Return stock, whose client drives every server."""
        del side
        return "stock"

    def spec(self, side: str) -> Mapping[str, Any]:
        """Return the path of a side's server."""
        paths = [*self.installations.paths[pairs.origin(side)], SCRIPTS]
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        return {"path": os.pathsep.join([*map(str, paths), *inherited])}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"{error}; quote its arguments as a shell would want them"
        raise argparse.ArgumentTypeError(message) from error


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.run.run`."""
    devices = pairs.visible()
    options = pairs.parser(__doc__ or "", PAIRS)
    options.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    size = "full" if devices else "small"
    options.add_argument("--size", choices=list(LOADS), default=size)
    text = "more arguments for `vllm serve`, quoted"
    options.add_argument("--server", type=_words, default=[], help=text)
    text = "arguments for `vllm bench serve`, quoted: your own dataset, rate and concurrency"
    options.add_argument("--client", type=_words, help=f"{text}, in place of the cases")
    text = "of both sides (%(default)s); on a CPU, VLLM_RUST_FRONTEND_PATH names the Rust one"
    options.add_argument("--front-end", choices=("python", "rust"), default="python", help=text)
    text = "seconds for a case, beyond which it fails (%(default)s)"
    options.add_argument("--timeout", type=float, default=300.0, dest="seconds", help=text)
    args = command_line.parse(options, argv)
    args.gpus = devices
    return run(args, lambda installations: ServingRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
