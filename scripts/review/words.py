"""Features and fixes on a release: what becomes of each word of ``VLLM_READINESS``.

A word lives if its patches merge, the functions that they stand in exist, and the model runner
that it serves is there. What a release has of a fix is known from patches/upstream.toml.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from overlay.patches import header_fields
from overlay.words import served
from packaging.version import Version

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

#: States of a word, best first.
LIVES, MENDED, LOST, CONFLICT = "lives", "mended", "gone", "conflicts"
#: What a release has of a fix, but for :data:`MENDED`.
PARTLY, NOT_MENDED, UNKNOWN = "mended in part", "not mended", "not known"
FEATURE, FIX = "feature", "fix"
#: What stands for the words of what all of them need.
FRAME = "frame"

Errata = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Word:
    """A feature or fix on a release.

    Attributes:
        name: as ``VLLM_READINESS`` has it.
        group: :data:`FEATURE`, :data:`FIX` or :data:`FRAME`.
        state: one of :data:`LIVES` to :data:`CONFLICT`.
        because: the reasons, for people; none if it lives.
        on_v2: whether it works under Model Runner V2.
    """

    name: str
    group: str
    state: str
    because: tuple[str, ...]
    on_v2: bool


def judge(
    registry: SimpleNamespace,
    patches: Iterable[JudgedPatch],
    mends: Mapping[str, Found],
    without_v1: bool,
) -> list[Word]:
    """Return the state of every word, features first, and of what all words need.

    Args:
        registry: the runtime's, of :func:`overlay.words.registry`.
        patches: the series on the release, judged.
        mends: by fix, what the release has of it.
        without_v1: whether the release has no Model Runner V1.
    """
    because: dict[str, list[str]] = defaultdict(list)
    conflicting: set[str] = set()
    for judged in patches:
        for word in served(judged.patch) or {FRAME}:
            if judged.verdict == CONFLICTS:
                conflicting.add(word)
                because[word].append(f"{judged.number} conflicts")
            elif judged.verdict == OBSOLETE:
                because[word].append(f"{judged.number} is obsolete")
    for name, word in sorted(registry.WORDS.items()):
        if needed := sorted(conflicting.intersection(word.needs)):
            conflicting.add(name)
            because[name] += [f"needs {each}" for each in needed]
    found = []
    for name in [*sorted(registry.FEATURES), *sorted(registry.FIXES), FRAME]:
        group = FRAME if name == FRAME else FEATURE if name in registry.FEATURES else FIX
        on_v2 = name in registry.ON_V2 or name == FRAME
        if without_v1 and not on_v2:
            because[name].append("the release has no Model Runner V1")
        state = CONFLICT if name in conflicting else LOST if because[name] else LIVES
        if (has := mends.get(name)) and has.state == MENDED:
            state, because[name] = MENDED, [f"the release has it {has.because}"]
        found.append(Word(name, group, state, tuple(because[name]), on_v2))
    return found


def switch(words: Iterable[Word]) -> str:
    """Return the value of ``VLLM_READINESS`` that leaves out what conflicts or is gone."""
    out = [word.name for word in words if word.state in (CONFLICT, LOST) and word.group != FRAME]
    return ",".join(f"-{name}" for name in out)


# Fixes and upstream


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


def mends(
    facts: Mapping[str, Any], release: str, patches: Sequence[JudgedPatch]
) -> dict[str, Found]:
    """Return by fix what a release has of it, beside what the merge says of its patches.

    Neither follows from the other: a patch may apply although upstream mends the same elsewhere.

    Args:
        facts: of :func:`series.errata.load`.
        release: the version under review.
        patches: of the whole series, judged.
    """
    fixes: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for name, erratum in facts["errata"].items():
        if erratum["word"]:
            fixes[erratum["word"]][name] = erratum
    has = {word: _has(errata, release, facts["read"]) for word, errata in fixes.items()}
    own = {
        word: {each.number: each for each in patches if _serves(each, word, errata)}
        for word, errata in fixes.items()
    }
    found = {}
    for word, judged in own.items():
        # A patch stays if another fix that is not mended needs it.
        shared = {
            number: [each for each in own if number in own[each] and has[each][0] != MENDED]
            for number in judged
        }
        found[word] = Found(word, *has[word], *_todo(has[word][0], list(judged.values()), shared))
    return found


def _serves(judged: JudgedPatch, word: str, errata: Errata) -> bool:
    """Return whether a patch serves only this fix, or serves it and has a bug of its errata."""
    words = served(judged.patch) or frozenset()
    bug = header_fields(judged.patch.header)["Bug"].rpartition("/")[2]
    bugs = {each for erratum in errata.values() for each in erratum["upstream"]}
    return words == {word} or (word in words and bug in bugs)


def _has(errata: Errata, release: str, read: str) -> tuple[str, str]:
    """Return what a release has of a fix, and how that is known.

    Args:
        errata: those that the fix mends.
        release: the version under review.
        read: the newest release whose sources were read.
    """
    version = Version(release)
    mended = [erratum.get("mended") for erratum in errata.values()]
    last = max(map(str, mended), key=Version) if all(mended) else None
    if last and Version(last) <= version:
        return MENDED, f"since {last}"
    parts = [part for erratum in errata.values() for part in erratum.get("partly", {}).items()]
    parts += [(since, name) for since, name in zip(mended, errata, strict=True) if since]
    parts.sort(key=lambda part: Version(part[0]))
    there = [f"{part} since {since}" for since, part in parts if Version(since) <= version]
    if last is None and version > Version(read):
        return UNKNOWN, "; ".join([f"{read} is the newest release that was read", *there])
    what = "the rest" if there else "it"
    later = f"{last} has {what}" if last else f"no release up to {read} has {what}"
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
