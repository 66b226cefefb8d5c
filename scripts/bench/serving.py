"""Measure serving: `vllm serve` on both sides, under closed-loop streams of chat completions.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--pairs A/B...] [--rounds N] ...
        [--streams N] [--api-servers N] [--front-end rust]
        [--model DIR] [--server "ARGUMENTS"] [--client "ARGUMENTS"]

A fixed number of streams is open, and each that ends is followed by another. Two sides are measured
at a time, and exchange places (:mod:`bench.harness.pairs`). An error in a stream ends the run.
With --client, stock's `vllm bench serve` sends the user's own traffic instead. DIR gets
manifest.json, run.json and run.md.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from demo import model
from overlay import output

from bench.harness import command_line, machine, pairs
from bench.harness.installations import SCRIPTS, Installations
from bench.harness.pairs import PairRun, Start
from bench.harness.run import run
from bench.loops.rows import ENGINES
from bench.servers import load as loads
from bench.servers.load import CASES, Load

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
        self._load = Load(args.engine, args.streams, args.model is None)
        directory = args.model.resolve() if args.model else installations.work / "model"
        self._model = str(directory)
        # Texts depend on the batches that requests meet, unless vLLM is told otherwise.
        self._compared = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        served = " ".join(filter(None, [_front_end(args), shlex.join(args.server)]))
        if args.client is not None:
            self.title = f"`vllm bench serve {shlex.join(args.client)}`, served with {served}. "
            self.title += f"Texts are {'' if self._compared else 'not '}compared."
        else:
            self.environment = {**self.environment, "HF_HUB_OFFLINE": "1"}
            client = machine.version("aiohttp", installations.site)
            how = "at the same time" if args.places == 2 else "in turns"
            self.title = (
                f"Closed loop through HTTP: {args.streams} streams of chat completions by "
                f"{args.clients} client processes (aiohttp {client} on uvloop), windows of "
                f"{args.seconds:g} s, both sides {how}, served with {served}."
            )
        if args.model:
            self.title += f" Model: {directory.name}."
        super().__init__(args, installations)
        if args.model is None:
            prepare(directory, args.engine)

    def starts(self) -> Sequence[Start]:
        """Return a start for each pair."""
        args, own = self.args, self.args.client
        flags = [] if own is not None and args.model else loads.flags(self._load)
        if args.front_end == "python":
            flags += ["--api-server-count", str(args.api_servers)]
        if not args.gpus:
            flags.append("--enforce-eager")
        settings = {
            "load": self._load,
            "clients": args.clients,
            "ramp": min(args.seconds / 4, 2.0),
            "seconds": args.seconds,
            "model": self._model,
            "flags": [*flags, *args.server],
            "own": own,
            "compared": self._compared,
            "front_end": args.front_end,
        }
        cases = {loads.OWN: loads.OWN}
        if own is None:
            cases = {f"{case}, {args.streams}": case for case in args.cases}
        about = f"{args.engine}, {_front_end(args)}"
        starts = []
        for pair in args.pairs:
            first, second = pair.split("/")
            starts.append(Start(about, (first, second), cases, settings))
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


def prepare(directory: Path, engine: str) -> None:
    """Write an engine's generated model, without weights, and its tokenizer."""
    shape = ENGINES[engine]
    model.write(directory, **{"max_position_embeddings": shape.length, **shape.model})
    for folder in (directory / "tokenizer", directory):  # the Rust front end looks in the latter
        model.write_tokenizer(folder, shape.vocabulary, chat_template=loads.TEMPLATE)


def _front_end(args: argparse.Namespace) -> str:
    if args.front_end == "rust":
        return "the Rust front end"
    return f"{args.api_servers} API server{'s' * (args.api_servers > 1)}"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"{error}; quote its arguments as a shell would want them"
        raise argparse.ArgumentTypeError(message) from error


def _number(text: str) -> int:
    if text.isdecimal() and (value := int(text)) > 0:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.run.run`."""
    devices = pairs.visible()
    options = pairs.parser(__doc__ or "", PAIRS)
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:3]))
    text = "the generated model, and the lengths of prompts and outputs (%(default)s)"
    usual = "half-b" if devices else "small"
    options.add_argument("--engine", choices=list(ENGINES), default=usual, help=text)
    text = "requests at a time (128; the engine's own for others than half-b)"
    options.add_argument("--streams", type=_number, help=text)
    text = "client processes of each side (%(default)s)"
    options.add_argument("--clients", type=_number, default=4, help=text)
    text = "seconds of each window (%(default)s), without its warm-up"
    options.add_argument("--seconds", type=float, default=10.0, help=text)
    text = "API server processes of each side (%(default)s)"
    options.add_argument("--api-servers", type=_number, default=1, help=text)
    options.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    text = "more arguments for `vllm serve`, quoted"
    options.add_argument("--server", type=_words, default=[], help=text)
    text = "arguments for `vllm bench serve`, quoted: your own dataset, rate and concurrency"
    options.add_argument("--client", type=_words, help=f"{text}, in place of the streams")
    text = "of both sides (%(default)s); on a CPU, VLLM_RUST_FRONTEND_PATH names the Rust one"
    options.add_argument("--front-end", choices=("python", "rust"), default="python", help=text)
    text = "seconds for traffic of --client, beyond which it fails (%(default)s)"
    options.add_argument("--timeout", type=float, default=300.0, help=text)
    args = command_line.parse(options, argv)
    if args.front_end == "rust" and args.api_servers > 1:
        options.error("--api-servers: the Rust front end is one process")
    args.streams = args.streams or ENGINES[args.engine].concurrency[0]
    args.clients = min(args.clients, args.streams)
    if args.client is not None:
        args.seconds = args.timeout
    args.gpus = devices
    return run(args, lambda installations: ServingRun(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
