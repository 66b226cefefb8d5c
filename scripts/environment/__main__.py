"""Entry point: ``python3 scripts/environment PURPOSE DIR``; see :mod:`environment.making`."""

try:
    import os
    import sys

    if not __package__:
        # Run as a directory: put its parent on the path so that it is a package.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    from environment import making
    from overlay import output

    code = output.run("environment", making.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("environment: interrupted\n")
    code = 130

raise SystemExit(code)
