"""Show a run as Markdown, and as one HTML page that needs no other file.

    PYTHONPATH=scripts python -m bench.report RUN.json [--html FILE] [--markdown FILE]

Without either flag, the Markdown is printed. The page needs jinja2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from overlay import output

from bench.errors import Failure
from bench.reports.markdown import markdown
from bench.reports.run_file import load


def main(argv: Sequence[str]) -> int:
    """Write what is asked for; 0 if it could be made, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="the JSON of a run")
    parser.add_argument("--html", type=Path, help="write the page to this file")
    parser.add_argument("--markdown", type=Path, help="write the Markdown to this file")
    args = parser.parse_args(argv)
    try:
        run = load(args.run)
        if args.html:
            from bench.reports.page import page

            args.html.write_text(page(run), encoding="utf-8")
        if args.markdown:
            args.markdown.write_text(markdown(run), encoding="utf-8")
        if not args.html and not args.markdown:
            print(markdown(run), end="")
    except (Failure, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(output.run("report", main))
