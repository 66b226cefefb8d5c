"""Entry point: ``python3 scripts/overlay COMMAND``."""

import sys
from pathlib import Path

if not __package__:
    # Run as a directory: put its parent on the path so that it is a package.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

if sys.version_info < (3, 10):
    sys.stderr.write(
        "overlay: needs Python 3.10 or newer, this is %d.%d; "
        "run it as python3.X scripts/overlay\n" % sys.version_info[:2]
    )
    raise SystemExit(2)

from overlay.cli import main

raise SystemExit(main())
