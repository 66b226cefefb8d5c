"""Show runs as Markdown, and join runs of the same installations and device.

    PYTHONPATH=scripts python -m bench.report RUN.json... [--join OUT.json]

Run files may be compressed. With --join the slices of all runs are written to OUT.json as one run,
compressed if the name ends in ".gz", and shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from overlay import output

from bench.errors import Failure
from bench.markdown import markdown
from bench.run import Run, load, save


def joined(runs: Sequence[Run]) -> Run:
    """Return one run with the slices of all.

    Raises:
        Failure: they have other installations or devices, or measure different things.
    """
    first, slices, base = runs[0], [], 0
    for one in runs:
        switch = [each.environment.get("VLLM_READINESS") for each in (one, first)]
        for name in ("digests", "device", "load", "title", "commit"):
            if getattr(one, name) != getattr(first, name) or switch[0] != switch[1]:
                raise Failure(f"{one.command} has another {name}, or another switch")
        slices += [replace(each, round=base + each.round) for each in one.slices]
        base = max((each.round for each in slices), default=base)
    return replace(
        first,
        command="; ".join(one.command for one in runs),
        slices=slices,
        seconds=sum(one.seconds for one in runs),
        complete=all(one.complete for one in runs),
        problems=[text for one in runs for text in one.problems],
    )


def main(argv: Sequence[str]) -> int:
    """Print the Markdown of each run, or of all runs as one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run files")
    parser.add_argument("--join", type=Path, metavar="OUT", help="write all runs as one to OUT")
    args = parser.parse_args(argv)
    try:
        runs = [load(file) for file in args.runs]
        if args.join:
            runs = [joined(runs)]
            save(args.join, runs[0])
        print("".join(map(markdown, runs)), end="")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
