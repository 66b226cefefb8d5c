"""Run upstream's own tests against a pristine and an overlaid copy of an installation.

    PYTHONPATH=scripts python -m conformance [--site SITE] [FILE...]

The test files of :mod:`conformance.selection`, or each FILE, run once on either copy, with the
same arguments. Exit codes: 0 if every test that passes on the pristine copy passes on the
overlaid one; 1 if not; those of scripts/overlay for a refusal. Logs are left in
build/conformance/logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import Failure
from bench.harness.command_line import end_on_signals
from overlay import cli, output
from overlay.errors import OverlayError
from overlay.output import escaped

from conformance import comparison

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str]) -> int:
    """Compare both copies; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="conformance", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="only these, as tests/v1/…")
    target = parser.add_argument_group("the installation, which stays as it is")
    target.add_argument("--venv", help="a virtual environment,")
    target.add_argument("--site", help="a site-packages directory,")
    target.add_argument("--python", help="or the interpreter that runs it, which needs pytest")
    parser.add_argument(
        "--tests", type=Path, help="upstream's unpacked source archive; without it, it is fetched"
    )
    parser.add_argument(
        "--as-listed", action="store_true", help="of another release: run the listed files it has"
    )
    args = parser.parse_args(argv)
    end_on_signals()
    try:
        folder = ROOT / "build" / "conformance"
        installation = cli.installation(args)
        result = comparison.run(installation, folder, args.tests, args.files, args.as_listed)
    except OverlayError as error:
        print(f"conformance: {error}", file=sys.stderr)
        return error.code
    except Failure as error:
        print(f"conformance: {escaped(str(error))}", file=sys.stderr)
        return 1
    print(result.table())
    return 1 if result.regressions else 0


if __name__ == "__main__":
    raise SystemExit(output.run("conformance", main))
