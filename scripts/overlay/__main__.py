"""Entry point: ``python3 scripts/overlay COMMAND``, or ``python -m overlay COMMAND``."""

try:
    import sys

    if sys.version_info < (3, 10):
        sys.stderr.write(
            "overlay: needs Python 3.10 or newer, this is %d.%d; "
            "run it as python3.X scripts/overlay\n" % sys.version_info[:2]
        )
        raise SystemExit(2)

    if not __package__:
        # Run by path (`python3 scripts/overlay`), not with -m: import from the package's parent.
        import os

        sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    from overlay import cli, output

    code = output.run("overlay", cli.main)
except KeyboardInterrupt:
    if sys.stderr is not None:
        sys.stderr.write("overlay: interrupted\n")
    code = 130

raise SystemExit(code)
