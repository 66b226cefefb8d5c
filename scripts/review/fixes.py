"""The fixes and upstream: which release mends what a fix mends, and which fixes can go.

The facts are those of patches/upstream.toml.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from overlay.patches import Series, header_fields
from overlay.words import SERVES
from packaging.version import Version
from series import errata

#: What a release has of a fix.
MENDED, PARTLY, NOT_MENDED, UNKNOWN = "mended", "mended in part", "not mended", "not known"


@dataclass(frozen=True)
class Mend:
    """Upstream's own mend of what a fix mends.

    Attributes:
        bugs: upstream's issues and pull requests, by number, and its advisories (GHSA-...).
        since: the first release that has all of it; None if :data:`READ` has not.
        partly: release to the part of it that this release was the first to have.
        patches: the names of the fix's patches without their numbers. A fix without any uses
            the seams of others.
    """

    bugs: tuple[str, ...] = ()
    since: str | None = None
    partly: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()


_ROOT = Path(__file__).resolve().parents[2]
_SERIES = Series.load(_ROOT / "patches")
_FACTS = errata.load(_ROOT)
#: The newest release whose sources were read for :data:`MENDS`.
READ: str = _FACTS["read"]


def _mend(word: str) -> Mend:
    """Combine the errata that a fix mends."""
    entries = {name: entry for name, entry in _FACTS["errata"].items() if entry["word"] == word}
    bugs = tuple(dict.fromkeys(bug for entry in entries.values() for bug in entry["upstream"]))
    since = [entry.get("mended") for entry in entries.values()]
    last = max(since, key=Version) if all(since) else None
    parts = [part for entry in entries.values() for part in entry.get("partly", {}).items()]
    parts += [(m, name) for m, name in zip(since, entries, strict=True) if m and m != last]
    partly: dict[str, str] = {}
    for release, part in sorted(parts, key=lambda item: Version(item[0])):
        partly[release] = "; ".join(filter(None, [partly.get(release), part]))
    return Mend(bugs, last, partly, _patches(word, bugs))


def _patches(word: str, bugs: Collection[str]) -> tuple[str, ...]:
    """Return the patches that serve a fix alone, or whose ``Bug`` is one of its bugs."""
    own = []
    for patch in _SERIES.patches:
        header = header_fields(patch.header)
        served = [each.strip() for each in header[SERVES].split(",")]
        if word in served and (served == [word] or header["Bug"].rpartition("/")[2] in bugs):
            own.append(patch.name.partition("-")[2].removesuffix(".patch"))
    return tuple(own)


#: Fix to what upstream has of it.
MENDS: Mapping[str, Mend] = MappingProxyType(
    {
        word: _mend(word)
        for word in dict.fromkeys(entry["word"] for entry in _FACTS["errata"].values())
        if word
    }
)
