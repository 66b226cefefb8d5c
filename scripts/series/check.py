"""Check that a checkout's patches, headers and checksums agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from overlay.errors import OverlayError
from overlay.files import holds
from overlay.patches import SERIES, Series, header_fields
from overlay.source import Overlay
from overlay.words import SERVES

from series import catalogue, errata
from series.checksums import expected_pin
from series.tree import generated

#: The required DEP-3 fields of a patch: why and how, the issue it answers, and when to drop it.
FIELDS = (
    *("Description", "How", SERVES, "Bug", "Author", "Forwarded", "Last-Update", "Drop-When"),
)


def complaints(root: Path, upstream: Callable[[str], bytes]) -> Iterator[str]:
    """Yield a sentence for each fault of a checkout; ``upstream`` returns a path's stock bytes."""
    try:
        overlay = load_unproven(root)
        for name in unlisted(root, overlay.series):
            yield f"patches/{name} is not listed in patches/series"
        for patch in overlay.series.patches:
            for name in missing_fields(patch.header):
                yield f"patches/{patch.name}: the header lacks {name}"
        if not holds(root / "patches" / catalogue.NAME, catalogue.page(overlay.series)):
            yield f"patches/{catalogue.NAME} is stale: run `make refresh`"
        for name, page in errata.pages(root).items():
            if not holds(root / name, page):
                yield f"{name} is not what patches/{errata.NAME} gives: run `make refresh`"
        pin = expected_pin(root, overlay.pin, overlay.series, upstream)
    except OverlayError as error:
        yield str(error)
        return
    if pin.dumps().encode() != overlay.pin_bytes:
        yield "VERSION_PIN is stale: run `make refresh`"


def load_unproven(root: Path) -> Overlay:
    """Read the overlay in ``root``, even if its patches are ahead of its checksums."""
    return Overlay.unproven(root)


def missing_fields(header: str) -> list[str]:
    """The required DEP-3 fields that ``header`` lacks or leaves empty."""
    fields = header_fields(header)
    return [name for name in FIELDS if not fields.get(name)]


def unlisted(root: Path, series: Series) -> list[str]:
    """The files in ``patches/`` that are not in the series."""
    listed = {patch.name for patch in series.patches} | {SERIES, catalogue.NAME}
    return sorted({file.name for file in generated(root)} - listed)
