"""Show a run as Markdown, and as one HTML page that needs no other file.

    PYTHONPATH=scripts python -m bench.report RUN.json [--html FILE] [--verify]

The Markdown is printed. What can be computed again from the raw figures of the run's children is,
and a run that says something else is not shown. With --verify that is all: what differs is named,
and what cannot be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from overlay import output

from bench.errors import Failure
from bench.reports.markdown import markdown
from bench.reports.page import page
from bench.reports.run_file import load
from bench.reports.verify import edited, unproven


def main(argv: Sequence[str]) -> int:
    """Print the Markdown, and write the page if asked to; 1 if the run is missing or edited."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the JSON of a run")
    parser.add_argument("--html", type=Path, help="also write the page to this file")
    parser.add_argument("--verify", action="store_true", help="check the run, and show nothing")
    args = parser.parse_args(argv)
    try:
        run = load(args.run)
        if found := edited(run):
            for text in found:
                print(f"report: {args.run} was edited: {text}", file=sys.stderr)
            return 1
        if args.verify:
            print(f"{args.run}: what it shows is what its raw figures make")
            for text in unproven(run):
                print(f"not checked: {text}")
            return 0
        print(markdown(run), end="")
        if args.html:
            args.html.write_text(page(run), encoding="utf-8")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
