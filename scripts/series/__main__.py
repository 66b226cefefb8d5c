"""Entry point: ``python -m series COMMAND``."""

import sys

try:
    from overlay import output

    from series import cli

    code = output.run("series", cli.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("series: interrupted\n")
    code = 130

raise SystemExit(code)
