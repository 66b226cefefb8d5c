"""Arguments, environment and signals that the benchmarks have in common."""

from __future__ import annotations

import argparse
import os
import re
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
    "VLLM_READINESS_PROBE": "it slows the overlaid side alone",
    "VLLM_READINESS_SYNC_GUARD": "it slows the overlaid side alone",
}
#: The side of another release of vLLM, with the runner that it chooses itself.
PEER = "peer"
#: Sides by name; "again" is stock once more.
NAMES = ("stock", "again", "mrv2", "overlaid-mrv2", "overlaid", PEER)
_SIDE = rf"{'|'.join(NAMES)}|overlaid=[^/]+"


def parser(description: str, pairs: Sequence[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that the benchmarks share.

    Args:
        description: of the program, in its first line.
        pairs: by default; those of Model Runner V2 need a GPU.
    """
    options = argparse.ArgumentParser(description=description.partition("\n")[0])
    options.add_argument("--venv", help="the installation: a virtual environment's directory,")
    options.add_argument("--site", help="or a site-packages directory")
    options.add_argument("--python", help="interpreter of the measured processes, if another")
    text = "site-packages directory of another release: the side `peer`, shown by its version"
    options.add_argument("--peer", type=Path, metavar="SITE", help=text)
    options.add_argument("--out", type=Path, help="directory for the results (build/bench/TIME)")
    text = "exchanged pairs (%(default)s); fewer than five make no claim"
    options.add_argument("--rounds", type=above_0(int), default=5, help=text)
    text = "seconds: begin no round that would end later, judged by the rounds so far"
    options.add_argument("--limit", type=above_0(float), default=float("inf"), help=text)
    usual = [pair(each) for each in pairs if gpus() or "mrv2" not in each]
    text = f"sides to compare, of {', '.join(NAMES)} and overlaid=VALUE"
    options.add_argument("--pairs", nargs="+", type=pair, metavar="A/B", default=usual, help=text)
    text = "1: the sides take turns; 2: at the same time, on halves of the cores (%(default)s)"
    places = min(2, max(1, len(gpus())))
    options.add_argument("--places", type=int, choices=(1, 2), default=places, help=text)
    return options


def prepare(options: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Set up this process for a run.

    The installation that is named or active becomes ``site`` and ``python``, and ``out`` is made.
    The program ends with a usage error if there is no such installation, or if ``out`` cannot
    be written to. SIGTERM and SIGHUP end the process from then on as
    :func:`end_on_signals` says, and the variables of :data:`LEFT_OUT` are gone.
    """
    if args.peer is None and any(PEER in sides for sides in args.pairs):
        options.error("--pairs: a pair has the side `peer`; name its site-packages with --peer")
    try:
        named = cli.installation(args)
    except OverlayError as error:
        options.error(str(error))
    args.site = named.site
    # Not resolved: an environment's interpreter is a link.
    args.python = str(named.interpreter or sys.executable)
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


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end this process by way of its ``finally`` blocks."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def gpus() -> list[str]:
    """Return the names of the GPUs that vLLM may use, as CUDA_VISIBLE_DEVICES has them."""
    if not Path("/dev/nvidiactl").exists():
        return []
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return named.split(",")
    # Counted from 0, whichever of the machine's devices a container shows.
    return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


def pair(text: str) -> tuple[str, str]:
    """Return the two sides of "A/B"; for argparse."""
    if not (found := re.fullmatch(f"({_SIDE})/(?!\\1$)({_SIDE})", text)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a pair; give A/B of {', '.join(NAMES)}, or overlaid=VALUE "
            "(of VLLM_READINESS)"
        )
    return found[1], found[2]


def above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Return a type of argparse for numbers above 0."""

    def number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
        return value

    return number
