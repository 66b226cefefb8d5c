"""Entry point: ``python -m series COMMAND``."""

import sys

if sys.version_info < (3, 10):
    sys.stderr.write(
        "series: needs Python 3.10 or newer, this is %d.%d; name one: PYTHON3=python3.X\n"
        % sys.version_info[:2]
    )
    raise SystemExit(2)

try:
    from overlay import output

    from series import cli

    code = output.run("series", cli.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("series: interrupted\n")
    code = 130

raise SystemExit(code)
