"""The fixes and upstream: which release mends what a fix mends, and which fixes can go.

The facts are those of patches/upstream.toml.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from overlay.patches import Series, header_fields
from overlay.words import SERVES
from packaging.version import Version
from series import errata

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

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


def judge(
    mends: Mapping[str, Mend], release: str, patches: Sequence[JudgedPatch]
) -> list[dict[str, Any]]:
    """Set what upstream mended beside what the merge says of each fix's patches.

    Args:
        mends: by fix.
        release: the version under review.
        patches: of the whole series, judged.

    Returns:
        The entries under "fixes" in review.json, in the order of ``mends``.
    """
    has = {name: _has(mend, release) for name, mend in mends.items()}
    by_title = {judged.patch.name.partition("-")[2]: judged for judged in patches}
    entries = []
    for name, mend in mends.items():
        own = [by_title[f"{title}.patch"] for title in mend.patches if f"{title}.patch" in by_title]
        sharing = {
            judged.patch.name: sorted(_keepers(judged, mends, has) - {name}) for judged in own
        }
        word, because = has[name]
        todo, look = _todo(word, own, sharing)
        entries.append(
            {
                "name": name,
                "bugs": list(mend.bugs),
                "has": word,
                "because": because,
                "patches": [{"name": p.patch.name, "verdict": p.verdict} for p in own],
                "todo": todo,
                "look": look,
            }
        )
    return entries


def warnings(fixes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for each of :func:`judge`'s entries that needs a decision."""
    for fix in fixes:
        if fix["look"]:
            yield f"the fix {fix['name']} is {fix['has']} ({fix['because']}): {fix['todo']}"


def _has(mend: Mend, release: str) -> tuple[str, str]:
    """What a release has of a fix, and how that is known."""
    version = Version(release)
    if mend.since is not None and Version(mend.since) <= version:
        return MENDED, f"since {mend.since}"
    parts = [f"{part} since {first}" for first, part in mend.partly.items()]
    there = [p for p, first in zip(parts, mend.partly, strict=True) if Version(first) <= version]
    if mend.since is None and version > Version(READ):
        return UNKNOWN, "; ".join([f"{READ} is the newest release that was read", *there])
    what = "the rest" if there else "it"
    later = f"{mend.since} has {what}" if mend.since else f"no release up to {READ} has {what}"
    return (PARTLY, "; ".join([*there, later])) if there else (NOT_MENDED, later)


def _keepers(
    judged: JudgedPatch, mends: Mapping[str, Mend], has: Mapping[str, tuple[str, str]]
) -> set[str]:
    """The fixes that still need a patch."""
    title = judged.patch.name.partition("-")[2].removesuffix(".patch")
    return {
        name for name, mend in mends.items() if title in mend.patches and has[name][0] != MENDED
    }


def _todo(
    has: str, patches: Sequence[JudgedPatch], sharing: Mapping[str, Sequence[str]]
) -> tuple[str, bool]:
    """What to do about a fix, and whether that needs a decision."""
    numbers = {judged.patch.name: judged.patch.name.partition("-")[0] for judged in patches}
    obsolete = [numbers[p.patch.name] for p in patches if p.verdict == OBSOLETE]
    conflicting = [numbers[p.patch.name] for p in patches if p.verdict == CONFLICTS]
    if has == UNKNOWN:
        return "read the release's source", True
    if has == PARTLY:
        return "keep it, and read what is left of it", True
    if has == NOT_MENDED:
        if obsolete:
            listed = ", ".join(obsolete)
            return f"read the release: {listed} is obsolete, and no mend is known", True
        return "keep it" + (f", and resolve {', '.join(conflicting)}" * bool(conflicting)), False
    phrases = ["drop it"] if patches else ["drop it; no patch is its own"]
    for judged in patches:
        number, others = numbers[judged.patch.name], sharing[judged.patch.name]
        if others:
            phrases.append(f"keep {number} for {', '.join(others)}")
        elif judged.verdict == OBSOLETE:
            phrases.append(f"drop {number}")
        elif judged.verdict == CONFLICTS:
            phrases.append(f"drop {number} rather than resolve it")
        else:
            phrases.append(f"drop {number}, though it applies: upstream mended it elsewhere")
    return "; ".join(phrases), True
