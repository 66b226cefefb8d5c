"""Entry point of the wheel's command, installed as ``readiness_overlay/__main__.py``."""

import sys
from pathlib import Path


def main() -> int:
    """Run the command line of the tool; return its exit code."""
    try:
        sys.path.insert(0, str(Path(__file__).parent / "scripts"))
        from overlay import cli, hints, output

        return output.run(hints.COMMAND, cli.main)
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("readiness-overlay: interrupted\n")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
