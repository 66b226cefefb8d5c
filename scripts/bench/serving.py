"""Measure serving: `vllm serve` on both sides, under closed-loop streams of chat completions.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--pairs A/B...] [--rounds N] ...
        [--streams N] [--api-servers N] [--front-end rust]
        [--model DIR] [--server "ARGUMENTS"] [--client "ARGUMENTS"]

A fixed number of streams is open, and each that ends is followed by another. Two sides are measured
at a time, and exchange places (:mod:`bench.harness.pairs`). An error ends its pair of sides.
With --client, stock's `vllm bench serve` sends the user's own traffic instead. DIR gets run.json
and run.md.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from overlay import output

from bench.harness import command_line, pairs
from bench.harness.command_line import above_0
from bench.harness.installations import Installations
from bench.harness.pairs import Plan, Start
from bench.loops.arguments import sizes, write
from bench.loops.rows import ENGINES, ROWS
from bench.servers.server import flags

PAIRS = ("again/stock", "overlaid/stock", "overlaid/mrv2")
#: Rows that chat completions can ask for.
CASES = [name for name, row in ROWS.items() if not row.thinking]
#: The case of the user's own client arguments.
OWN = "own traffic"
#: Seconds for the traffic of --client.
_LONGEST = 3600.0

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "INFO",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


def plan(args: argparse.Namespace, installations: Installations) -> Plan:
    """Return the plan of a run; a generated model is made once for all servers."""
    own, directory = args.client, args.model and args.model.resolve()
    front_end = "the Rust front end"
    if args.front_end == "python":
        front_end = f"{args.api_servers} API server{'s' * (args.api_servers > 1)}"
    served = " ".join(filter(None, [front_end, shlex.join(args.server)]))
    environment = dict(ENVIRONMENT)
    if own is not None:
        title = f"`vllm bench serve {shlex.join(own)}`, served with {served}."
        cases = {OWN: OWN}
    else:
        environment["HF_HUB_OFFLINE"] = "1"
        how = "at the same time" if args.places == 2 else "in turns"
        title = (
            f"Closed loop through HTTP: {args.streams} streams of chat completions by "
            f"{args.clients} client processes, windows of {args.seconds:g} s, both sides {how}, "
            f"served with {served}."
        )
        cases = {f"{case}, {args.streams}": case for case in args.cases}
    given = {"api_server_count": args.api_servers} if args.front_end == "python" else {}
    if directory:
        name, tokenizer = directory.name, directory
    else:
        name, directory = ENGINES[args.engine].label, installations.work / "model"
        tokenizer = directory / "tokenizer"
        write(directory, args.engine)
        given |= sizes(args.engine, args.streams)
    spec = {
        "kind": "server",
        "engine": args.engine,
        "streams": args.streams,
        "clients": args.clients,
        "ramp": min(args.seconds / 4, 2.0),
        "seconds": args.seconds,
        "model": str(directory),
        "tokenizer": str(tokenizer),
        "flags": [*flags(given), *["--enforce-eager"] * (not args.gpus), *args.server],
        "own": own,
        "front_end": args.front_end,
    }
    starts = [Start(f"{name}, {front_end}", pair, cases, spec) for pair in args.pairs]
    # Stock's client drives every server.
    kind = "streams" if own is None else "own"
    return Plan(kind, title, environment, starts, client="stock")


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        message = f"{error}; quote its arguments as a shell would want them"
        raise argparse.ArgumentTypeError(message) from error


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table; see :func:`bench.harness.pairs.measure`."""
    devices = command_line.gpus()
    options = command_line.parser(__doc__ or "", PAIRS)
    options.add_argument(
        "--cases", nargs="+", choices=CASES, default=["plain", "mixed", "logprobs"]
    )
    text = "the generated model, and the lengths of prompts and outputs (%(default)s)"
    usual = "half-b" if devices else "small"
    options.add_argument("--engine", choices=list(ENGINES), default=usual, help=text)
    text = "requests at a time (128; the engine's own for others than half-b)"
    options.add_argument("--streams", type=above_0(int), help=text)
    text = "client processes of each side (%(default)s)"
    options.add_argument("--clients", type=above_0(int), default=4, help=text)
    text = "seconds of each window (%(default)s), without its warm-up"
    options.add_argument("--seconds", type=float, default=10.0, help=text)
    text = "API server processes of each side (%(default)s)"
    options.add_argument("--api-servers", type=above_0(int), default=1, help=text)
    options.add_argument(
        "--model", type=Path, help="a model's directory, for --client (one is generated)"
    )
    text = "more arguments for `vllm serve`, quoted"
    options.add_argument("--server", type=_words, default=[], help=text)
    text = "arguments for `vllm bench serve`, quoted: your own dataset, rate and concurrency"
    options.add_argument("--client", type=_words, help=f"{text}, in place of the streams")
    text = "of both sides (%(default)s); on a CPU, VLLM_RUST_FRONTEND_PATH names the Rust one"
    options.add_argument("--front-end", choices=("python", "rust"), default="python", help=text)
    args = options.parse_args(argv)
    if args.front_end == "rust" and args.api_servers > 1:
        options.error("--api-servers: the Rust front end is one process")
    if args.model and not (args.model / "config.json").is_file():
        options.error(f"--model {args.model} has no config.json; name a model's directory")
    if args.model and args.client is None:
        options.error("--model: your own model needs --client, which says what it is asked")
    args.streams = args.streams or ENGINES[args.engine].concurrency[0]
    args.clients = min(args.clients, args.streams)
    args.seconds = args.seconds if args.client is None else _LONGEST
    args.gpus = devices
    command_line.prepare(options, args)
    return pairs.measure(args, lambda installations: plan(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
