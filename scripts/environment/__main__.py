"""Entry point: ``python -m environment PURPOSE DIR``; see :mod:`environment.making`."""

import sys

try:
    from environment import making
    from overlay import output

    code = output.run("environment", making.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("environment: interrupted\n")
    code = 130

raise SystemExit(code)
