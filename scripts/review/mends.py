"""The fixes and upstream: what a release has of each, and what to do about it.

The facts are those of patches/upstream.toml.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from overlay.patches import Series, header_fields
from packaging.version import Version
from series import errata

from review import words
from review.merging import CONFLICTS, OBSOLETE, JudgedPatch
from review.words import MENDED

#: What a release has of a fix, but for :data:`review.words.MENDED`.
PARTLY, NOT_MENDED, UNKNOWN = "mended in part", "not mended", "not known"


@dataclass(frozen=True)
class Mend:
    """Upstream's own mend of what a fix mends.

    Attributes:
        since: the first release that has all of it; None if :data:`READ` has not.
        partly: release to the part of it that this release was the first to have.
        patches: the names of the fix's patches. A fix without any uses the seams of others.
    """

    since: str | None = None
    partly: Mapping[str, str] = field(default_factory=dict)
    patches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """State of one of our fixes in a release.

    Attributes:
        name: of the fix.
        state: ``mended``, or one of :data:`PARTLY` to :data:`UNKNOWN`.
        because: how that is known, as ``since 0.24.0``.
        todo: what to do about it.
        decide: whether a person must.
    """

    name: str
    state: str
    because: str
    todo: str
    decide: bool


_ROOT = Path(__file__).resolve().parents[2]
_SERIES = Series.load(_ROOT / "patches")
_FACTS = errata.load(_ROOT)
#: The newest release whose sources were read for :data:`MENDS`.
READ: str = _FACTS["read"]


def _mend(word: str) -> Mend:
    """Combine the errata that a fix mends."""
    entries = {name: entry for name, entry in _FACTS["errata"].items() if entry["word"] == word}
    bugs = {bug for entry in entries.values() for bug in entry["upstream"]}
    since = [entry.get("mended") for entry in entries.values()]
    last = max(since, key=Version) if all(since) else None
    parts = [part for entry in entries.values() for part in entry.get("partly", {}).items()]
    parts += [(m, name) for m, name in zip(since, entries, strict=True) if m and m != last]
    partly: dict[str, str] = {}
    for release, part in sorted(parts, key=lambda item: Version(item[0])):
        partly[release] = "; ".join(filter(None, [partly.get(release), part]))
    return Mend(last, partly, _patches(word, bugs))


def _patches(word: str, bugs: Collection[str]) -> tuple[str, ...]:
    """Return the patches that serve a fix alone, or whose ``Bug`` is one of its bugs."""
    own = []
    for patch in _SERIES.patches:
        served, bug = words.of_patch(patch), header_fields(patch.header)["Bug"].rpartition("/")[2]
        if served == {word} or (word in served and bug in bugs):
            own.append(patch.name)
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
) -> dict[str, Found]:
    """Return what a release has of each fix, beside what the merge says of its patches.

    Neither follows from the other: a patch may apply although upstream mends the same elsewhere.

    Args:
        mends: by fix.
        release: the version under review.
        patches: of the whole series, judged.
    """
    has = {name: _has(mend, release) for name, mend in mends.items()}
    found = {}
    for name, mend in mends.items():
        own = tuple(judged for judged in patches if judged.patch.name in mend.patches)
        shared = {
            judged.number: [
                other
                for other, its in mends.items()
                if judged.patch.name in its.patches and has[other][0] != MENDED
            ]
            for judged in own
        }
        todo, decide = _todo(has[name][0], own, shared)
        found[name] = Found(name, *has[name], todo, decide)
    return found


def _has(mend: Mend, release: str) -> tuple[str, str]:
    version = Version(release)
    if mend.since is not None and Version(mend.since) <= version:
        return MENDED, f"since {mend.since}"
    there = [f"{part} since {v}" for v, part in mend.partly.items() if Version(v) <= version]
    if mend.since is None and version > Version(READ):
        return UNKNOWN, "; ".join([f"{READ} is the newest release that was read", *there])
    what = "the rest" if there else "it"
    later = f"{mend.since} has {what}" if mend.since else f"no release up to {READ} has {what}"
    return (PARTLY, "; ".join([*there, later])) if there else (NOT_MENDED, later)


def _todo(
    has: str, patches: Sequence[JudgedPatch], shared: Mapping[str, Sequence[str]]
) -> tuple[str, bool]:
    """Return what to do about a fix, and whether that needs a decision."""
    if has == UNKNOWN:
        return "read the release's source", True
    if has == PARTLY:
        return "keep it, and read what is left of it", True
    if has == NOT_MENDED:
        if obsolete := [each.number for each in patches if each.verdict == OBSOLETE]:
            return f"read the release: {', '.join(obsolete)} is obsolete, no mend is known", True
        conflicting = [each.number for each in patches if each.verdict == CONFLICTS]
        return "keep it" + f", and resolve {', '.join(conflicting)}" * bool(conflicting), False
    phrases = ["drop it" if patches else "drop it; no patch is its own"]
    for number, others in shared.items():
        phrases.append(f"keep {number} for {', '.join(others)}" if others else f"drop {number}")
    return "; ".join(phrases), True
