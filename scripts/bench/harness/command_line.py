"""Arguments, environment and signals that the benchmarks have in common."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path

from overlay import cli
from overlay.errors import OverlayError

from bench.harness.installations import ROOT

#: Variables that are kept from the measured processes, and why.
LEFT_OUT = {
    "VLLM_PLUGINS": "it would keep the probe, or its like, from the sides",
    "VLLM_READINESS_PROBE": "every process would write to one file; each gets its own",
    "VLLM_READINESS_SYNC_GUARD": "it slows the overlaid side alone",
}


def parser(description: str, rounds: int, limit: float | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share.

    Args:
        description: of the program, in its first line.
        rounds: their number by default.
        limit: seconds of a run by default.
    """
    options = argparse.ArgumentParser(description=description.partition("\n")[0])
    options.add_argument("--venv", help="the installation: a virtual environment's directory,")
    options.add_argument("--site", help="or a site-packages directory")
    options.add_argument("--python", help="interpreter of the measured processes, if another")
    options.add_argument("--out", type=Path, help="directory for the results (build/bench/TIME)")
    text = "exchanged pairs (%(default)s); fewer than five make no claim"
    options.add_argument("--rounds", type=_above_0(int), default=rounds, help=text)
    text = "seconds: begin no round that would end later, judged by the rounds so far"
    options.add_argument("--limit", type=_above_0(float), default=limit, help=text)
    return options


def parse(options: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, and set up this process for a run.

    The installation that is named or active becomes ``site`` and ``python``, and ``out`` is made.
    The program ends with a usage error if there is no such installation or model, or if ``out``
    cannot be written to. SIGTERM and SIGHUP end the process from then on as
    :func:`end_on_signals` says, and the variables of :data:`LEFT_OUT` are gone.
    """
    args = options.parse_args(argv)
    try:
        named = cli.installation(args)
    except OverlayError as error:
        options.error(str(error))
    args.site = named.site
    # Not resolved: an environment's interpreter is a link.
    args.python = str(named.interpreter or sys.executable)
    if vars(args).get("model") and not (args.model / "config.json").is_file():
        options.error(f"--model {args.model} has no config.json; name a model's directory")
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
    args.out = args.out or ROOT / "build" / "bench" / now
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=args.out).close()
    except OSError as error:
        options.error(f"--out {args.out}: {error.strerror}; name a directory to write to")
    for name, reason in LEFT_OUT.items():
        if os.environ.pop(name, None) is not None:
            print(f"bench: {name} is left out: {reason}", file=sys.stderr)
    if (switch := os.environ.get("VLLM_READINESS")) is not None:
        text = f"bench: VLLM_READINESS={switch} is kept: the overlaid side runs with it"
        print(text, file=sys.stderr)
    end_on_signals()
    return args


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process by way of its ``finally`` blocks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    def number(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if 0 < value < float("inf"):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")

    return number
