"""Describe a foreign file: who has changed it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone

from overlay import record
from overlay.files import read
from overlay.patches import split_lines
from overlay.source import MARK
from overlay.state import FileState, Inspection

#: A comment in which a patcher names itself. The upstream files that we patch have none.
_MARK = re.compile(
    rb"^\s*#.*\b((patched|modified|changed|edited|ported)\s+by|back-?ported|patched\s+for)\b",
    re.IGNORECASE,
)


def describe(inspection: Inspection, file: FileState) -> list[str]:
    """Return a sentence for each comment of a patcher, and the package with these bytes.

    Returns nothing for an absent file, or for a file that the overlay does not change.
    """
    if file.data is None or file.path not in inspection.overlay.pin.upstream:
        return []
    return [*_marks(file.data), _package(inspection, file, file.data)]


def _marks(data: bytes) -> Iterator[str]:
    for number, line in enumerate(split_lines(data), 1):
        if _MARK.search(line) and MARK not in line:
            yield f"line {number} says: {line.decode(errors='replace').strip()[:100]}"


def _package(inspection: Inspection, file: FileState, data: bytes) -> str:
    """Return the package whose RECORD lists the file's bytes, or their time of modification."""
    site, now = inspection.installation.site, record.row(file.path, data)
    for path in sorted(site.glob("*.dist-info/RECORD")):
        try:
            rows = [line.rstrip(b"\r\n") for line in split_lines(read(path))]
        except OSError:
            continue
        if now in rows:
            return f"{path.parent.name} installed it: its RECORD lists these bytes"
    time = datetime.fromtimestamp((site / file.path).stat().st_mtime, timezone.utc)
    return f"no package's RECORD lists these bytes; last modified on {time:%Y-%m-%d %H:%M UTC}"
