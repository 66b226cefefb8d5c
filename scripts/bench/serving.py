"""Measure serving: `vllm serve` on both sides, under closed-loop streams of chat completions.

    PYTHONPATH=scripts python -m bench.serving [--site SITE] [--pairs A/B...] [--rounds N] ...
        [--streams N] [--api-servers N] [--front-end rust]
        [--model DIR] [--server "ARGUMENTS"] [--client "ARGUMENTS"]

A fixed number of streams is open, and each that ends is followed by another. Two sides are measured
at a time, and exchange places (:mod:`bench.harness.pairs`). An error in a stream ends the run.
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

from demo import model
from overlay import output

from bench.harness import command_line, pairs
from bench.harness.command_line import above_0
from bench.harness.installations import Installations
from bench.harness.pairs import Plan, Start
from bench.loops.rows import ENGINES
from bench.servers import load as loads
from bench.servers.load import CASES, Load

PAIRS = ("again/stock", "overlaid/stock", "overlaid/mrv2")


ENVIRONMENT: Mapping[str, str] = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
}


def plan(args: argparse.Namespace, installations: Installations) -> Plan:
    """Return the plan of a run; a generated model is made once for all servers."""
    load, own = Load(args.engine, args.streams, args.model is None), args.client
    directory = args.model.resolve() if args.model else installations.work / "model"
    front_end = "the Rust front end"
    if args.front_end == "python":
        front_end = f"{args.api_servers} API server{'s' * (args.api_servers > 1)}"
    served = " ".join(filter(None, [front_end, shlex.join(args.server)]))
    environment, how = dict(ENVIRONMENT), "at the same time" if args.places == 2 else "in turns"
    if own is not None:
        title = f"`vllm bench serve {shlex.join(own)}`, served with {served}."
    else:
        environment["HF_HUB_OFFLINE"] = "1"
        title = (
            f"Closed loop through HTTP: {args.streams} streams of chat completions by "
            f"{args.clients} client processes, windows of {args.seconds:g} s, both sides {how}, "
            f"served with {served}."
        )
    if load.generated:
        shape = ENGINES[args.engine]
        model.write(directory, **{"max_position_embeddings": shape.length, **shape.model})
        for folder in (
            directory / "tokenizer",
            directory,
        ):  # the Rust front end looks in the latter
            model.write_tokenizer(folder, shape.vocabulary, chat_template=loads.TEMPLATE)
    flags = [] if own is not None and args.model else loads.flags(load)
    if args.front_end == "python":
        flags += ["--api-server-count", str(args.api_servers)]
    if not args.gpus:
        flags.append("--enforce-eager")
    spec = {
        "kind": "server",
        "load": tuple(load),
        "clients": args.clients,
        "ramp": min(args.seconds / 4, 2.0),
        "seconds": args.seconds,
        "model": str(directory),
        "flags": [*flags, *args.server],
        "own": own,
        "front_end": args.front_end,
    }
    cases = {f"{case}, {args.streams}": case for case in args.cases}
    if own is not None:
        cases = {loads.OWN: loads.OWN}
    label = f"{ENGINES[args.engine].label if load.generated else directory.name}, {front_end}"
    sides = ((first, second) for first, _, second in (each.partition("/") for each in args.pairs))
    starts = [Start(label, of, cases, spec) for of in sides]
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
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:3]))
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
    return pairs.measure(args, lambda installations: plan(args, installations))


if __name__ == "__main__":
    raise SystemExit(output.run("bench", main))
