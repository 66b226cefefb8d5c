"""Arguments, environment and signals that the benchmarks have in common."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from overlay import cli
from overlay.errors import OverlayError

from bench.compare.installations import ROOT

#: Variables that are kept from the measured processes, and why.
LEFT_OUT = {
    "VLLM_PLUGINS": "it would keep the probe, or its like, from the sides",
    "VLLM_READINESS_PROBE": "every process would write to one file; each gets its own",
    "VLLM_READINESS_SYNC_GUARD": "it slows the overlaid side alone",
}


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the installation, the model, and where results go."""
    parser.add_argument("--venv", help="the installation: a virtual environment's directory,")
    parser.add_argument("--site", help="or a site-packages directory")
    parser.add_argument("--python", help="interpreter of the measured processes, if another")
    parser.add_argument("--model", type=Path, help="a model's directory (one is generated)")
    parser.add_argument("--out", type=Path, help="directory for the results (build/bench/TIME)")


def resolve_target(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Find the installation that is named or active; set ``site``, ``python`` and ``out``.

    The program ends with a usage error if there is no such installation or model, or if
    ``out`` is a file.
    """
    try:
        named = cli.installation(args)
    except OverlayError as error:
        parser.error(str(error))
    args.site = named.site
    # Not resolved: an environment's interpreter is a link.
    args.python = str(named.interpreter or sys.executable)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d-%H%M%S")
    args.out = args.out or ROOT / "build" / "bench" / now
    if args.model and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} has no config.json; name a model's directory")


def make_directory(parser: argparse.ArgumentParser, option: str, directory: Path) -> None:
    """Make a directory for results; a usage error if it cannot be written to."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        parser.error(f"{option} {directory}: {error.strerror}; name a directory to write to")


def rounds(text: str) -> int:
    """Parse a number of rounds.

    Raises:
        ArgumentTypeError: it is not a number of 1 or more.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rounds; give 1 or more")
    return int(text)


def leave_out() -> None:
    """Remove the variables that would spoil a comparison, and print which."""
    for name, reason in LEFT_OUT.items():
        if os.environ.pop(name, None) is not None:
            print(f"bench: {name} is left out: {reason}", file=sys.stderr)
    if (switch := os.environ.get("VLLM_READINESS")) is not None:
        text = f"bench: VLLM_READINESS={switch} is kept: the overlaid side runs with it"
        print(text, file=sys.stderr)


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process by way of its ``finally`` blocks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))
