"""The tool, run by a user without rights."""

import os
import sys
from pathlib import Path

from overlay import cli

from support.sites import REPO

ID = 65534


def admit(folder: Path) -> None:
    """Let nobody read a test's directory, whatever the umask was."""
    for path in (REPO / "build", *folder.parents[:2], folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a command in a forked child that is nobody; its exit code and stderr.

    The child has imported the tool, whose files that user may be unable to read. ``folder`` is the
    test's directory; see :func:`admit`.
    """
    error = folder / "stderr"
    if not (child := os.fork()):
        with error.open("w") as sys.stderr:
            os.chdir(folder)
            os.setgroups([])
            os.setgid(ID)
            os.setuid(ID)
            code = cli.main(arguments)
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), error.read_text()
