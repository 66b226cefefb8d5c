"""The candidate: the series and the pin for a release in which every patch merges, and its faults.

A merge of lines knows nothing of Python: merged files are faulty if ruff finds a syntax error, or
an undefined or redefined name that neither the release nor the overlay has.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import NAME as PIN
from overlay.source import Overlay
from series import refresh
from series.tree import write_file

from review.merging import OBSOLETE, Merged
from review.wheels import Release

#: ruff's rules: statements out of place, undefined names, a local variable read before it is set,
#: and a definition that replaces another one which nothing has used.
_RULES = "F7,F821,F823,F811"


def make(overlay: Overlay, release: Release, merged: Merged) -> dict[str, bytes]:
    """Return the files of ``patches/`` for a release, and its VERSION_PIN, by path.

    Obsolete patches are left out. The series has no conflicts.

    Raises:
        OverlayError: git fails.
    """
    kept = [each for each in merged.patches if each.verdict != OBSOLETE]
    commits = [(each.patch.header, each.step) for each in kept]
    files, pin = refresh.candidate(
        overlay, release.upstream, release.version, release.archives, commits
    )
    return files | {PIN: pin.dumps().encode()}


def faults(release: Release, merged: Merged) -> list[str]:
    """Return a sentence for each of ruff's findings that is new in a merged file.

    Raises:
        OverlayError: ruff cannot be run.
    """
    whole = {p: text for p, text in merged.texts.items() if text and p not in merged.conflicts}
    known: set[tuple[str, str]] = set()
    for read in (release.upstream.read, merged.overlaid.__getitem__):
        found = _ruff({path: read(path) for path in whole})
        known |= {(path, _unnumbered(message)) for path, _, message in found}
    return [
        f"{path}, line {line}: {message}"
        for path, line, message in _ruff(whole)
        if (path, _unnumbered(message)) not in known
    ]


def _ruff(texts: Mapping[str, bytes]) -> list[tuple[str, int, str]]:
    """Return path, line and sentence of each of ruff's findings in these files."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    command += ["--exit-zero", "--select", _RULES, "--output-format", "json", "."]
    with tempfile.TemporaryDirectory(prefix="overlay-ruff-") as scratch:
        folder = Path(scratch).resolve()
        for path, text in texts.items():
            write_file(folder / path, text)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OverlayError(
            Exit.FAULT,
            f"ruff cannot be run: {done.stderr.strip()}",
            next_step="run `make tools`, which installs it",
        )
    return [
        (
            Path(entry["filename"]).relative_to(folder).as_posix(),
            entry["location"]["row"],
            f"{entry['message']} ({entry['code']})",
        )
        for entry in json.loads(done.stdout)
    ]


def _unnumbered(text: str) -> str:
    return re.sub(r"\bline \d+", "line", text)
