"""Show the parts of a step and the waits for the device.

    python3 scripts/probe SOURCE

SOURCE is the address of a running server's metrics, such as http://localhost:8000/metrics, or the
file that VLLM_READINESS_PROBE named when an engine ran. Prints a table for each process; times are
in milliseconds. Needs the standard library only, and not vLLM.
"""

from __future__ import annotations

import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until output.run: there is nothing to clean up

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

if not __package__:
    # Run by path (`python3 scripts/probe`), not with -m: import from the package's parent.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from overlay import output
from overlay.output import escaped

from probe import report

#: Seconds to wait for a server's page.
_PATIENCE = 10


def main(argv: Sequence[str]) -> int:
    """Print the table; return 0, or 1 if there is nothing to read."""
    parser = argparse.ArgumentParser(prog="probe", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="the address of /metrics, or a file of the probe")
    source = parser.parse_args(argv).source
    try:
        text = report.text(_page(source))
    except (OSError, ValueError) as error:
        print(escaped(f"probe: {source or 'FILE'}: {error}"), file=sys.stderr)
        return 1
    print(text, end="")
    return 1 if output.lost() else 0


def _page(source: str) -> str:
    """Read a page of metrics.

    Raises:
        OSError: the page cannot be read.
        ValueError: no source is named.
    """
    if not source:
        raise ValueError(
            "name a file, or an address: make probe FILE=http://localhost:8000/metrics"
        )
    if source.startswith(("http://", "https://")):
        with urlopen(source, timeout=_PATIENCE) as answer:
            return str(answer.read(), "utf-8", "replace")
    return Path(source).read_text("utf-8", "replace")


if __name__ == "__main__":
    raise SystemExit(output.run("probe", main))
