"""Describe a foreign file: its patcher, and whether the overlay's patches might merge.

Upstream's file is not available for comparison; only the lines in our patches are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from overlay import record
from overlay.files import read
from overlay.patches import Hunk, composed, split_lines
from overlay.source import MARK
from overlay.state import FileState, Inspection

#: A comment in which a patcher names itself. The upstream files that we patch have none.
_MARK = re.compile(
    rb"^\s*#.*\b((patched|modified|changed|edited|ported)\s+by|back-?ported|patched\s+for)\b",
    re.IGNORECASE,
)


def describe(inspection: Inspection, file: FileState) -> list[str]:
    """Describe a foreign file: its patcher, and whether the overlay's patches might merge.

    Returns sentences; none for an absent file, or for a file that the overlay does not change.
    """
    overlay = inspection.overlay
    if file.data is None or file.path not in overlay.pin.upstream:
        return []
    return [
        *_marks(file.data),
        *_package(inspection, file, file.data),
        *_changes(composed(overlay.series, file.path), file.data),
    ]


def _marks(data: bytes) -> Iterator[str]:
    for number, line in enumerate(split_lines(data), 1):
        if _MARK.search(line) and MARK not in line:
            yield f"line {number} says: {line.decode(errors='replace').strip()[:100]}"


def _package(inspection: Inspection, file: FileState, data: bytes) -> Iterator[str]:
    """Yield the packages that list the file; without any, its time of modification."""
    installation = inspection.installation
    start, now = f"{file.path},".encode(), record.row(file.path, data)
    listed = False
    for path in sorted(installation.site.glob("*.dist-info/RECORD")):
        try:
            rows = [line.rstrip(b"\r\n") for line in split_lines(read(path))]
        except OSError:
            continue
        if now in rows:
            yield f"{path.parent.name} installed it: its RECORD lists these bytes"
            listed = True
        elif path != installation.record and any(row.startswith(start) for row in rows):
            yield f"{path.parent.name} also lists it, with other bytes"
    if not listed:
        changed = _time(installation.site / file.path)
        yield f"no package's RECORD lists these bytes; last modified on {changed}"


def _time(path: Path) -> str:
    time = datetime.fromtimestamp(path.stat().st_mtime, timezone.utc)
    return time.strftime("%Y-%m-%d %H:%M UTC")


def _changes(hunks: Sequence[Hunk], data: bytes) -> Iterator[str]:
    """Yield whether the overlay's changes are in the file, or might be merged into it.

    ``hunks`` lead from upstream's file to ours. Pure insertions are not looked for.
    """
    ours, upstreams = ([h for h in hunks if h.old and h.new], [h for h in hunks if h.old])
    present = [h for h in ours if _holds(data, h.new)]
    lost = [h for h in upstreams if not _holds(data, h.old)]
    if len(present) > len(upstreams) - len(lost):
        yield f"{len(present)} of the overlay's {len(ours)} replacements of lines are in it"
    elif lost:
        lines = ", ".join(str(hunk.old_at + 1) for hunk in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        where = f"upstream's lines {lines}{more}, which the overlay replaces"
        yield f"the overlay's patches cannot be merged: it lacks {where}"
    else:
        yield "the overlay's patches may merge: it has every line that they replace"


def _holds(data: bytes, lines: Sequence[bytes]) -> bool:
    """Return whether the lines occur in a file, one behind the other."""
    return b"\n" + b"".join(lines) in b"\n" + data
