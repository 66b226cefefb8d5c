"""Entry point: ``python3 scripts/overlay COMMAND``."""

try:
    import os
    import sys

    if not __package__:
        # Run as a directory: put its parent on the path so that it is a package.
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    if sys.version_info < (3, 10):
        sys.stderr.write(
            "overlay: needs Python 3.10 or newer, this is %d.%d; "
            "run it as python3.X scripts/overlay\n" % sys.version_info[:2]
        )
        raise SystemExit(2)

    from overlay import cli, output

    code = output.run("overlay", cli.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("overlay: interrupted\n")
    code = 130

raise SystemExit(code)
