"""Show a run as Markdown, and as one HTML page that needs no other file.

    PYTHONPATH=scripts python -m bench.report RUN.json [--html FILE]

The Markdown is printed.
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


def main(argv: Sequence[str]) -> int:
    """Print the Markdown, and write the page if asked to; 0, or 1 if there is no such run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the JSON of a run")
    parser.add_argument("--html", type=Path, help="also write the page to this file")
    args = parser.parse_args(argv)
    try:
        run = load(args.run)
        print(markdown(run), end="")
        if args.html:
            args.html.write_text(page(run), encoding="utf-8")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
