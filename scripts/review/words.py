"""Features and fixes on a release: the state of each word of ``VLLM_READINESS``.

A word lives if its patches merge, the functions that they stand in exist, and the model runner
that it serves is there. What a release has of a fix is known from patches/upstream.toml; a patch
may apply although upstream mends the same elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlay.source import Overlay
from overlay.words import MODULE, registry, served
from packaging.version import Version

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

#: States of a word, best first.
LIVES, MENDED, LOST, CONFLICT = "lives", "mended", "gone", "conflicts"
PARTLY = "mended in part"


@dataclass(frozen=True)
class Word:
    """A feature or fix on a release.

    Attributes:
        name: as ``VLLM_READINESS`` has it.
        state: one of :data:`LIVES` to :data:`CONFLICT`.
        because: the reasons, for people; none if it lives.
        on_v2: True if it works under Model Runner V2.
        todo: a sentence on a mend in the release that needs a decision; may be empty.
    """

    name: str
    state: str
    because: tuple[str, ...]
    on_v2: bool
    todo: str = ""


def judge(
    overlay: Overlay,
    patches: Sequence[JudgedPatch],
    facts: Mapping[str, Any],
    release: str,
    without_v1: bool,
) -> list[Word]:
    """Return the state of every word, features first.

    Args:
        overlay: the overlay; without a registry it has no words.
        patches: the series on the release, judged.
        facts: of :func:`series.errata.load`.
        release: the version under review.
        without_v1: whether the release has no Model Runner V1.
    """
    if MODULE not in overlay.pin.result:
        return []
    known = registry(overlay)
    because: dict[str, list[str]] = defaultdict(list)
    conflicting: set[str] = set()
    for judged in patches:
        for word in served(judged.patch) or ():
            if judged.verdict == CONFLICTS:
                conflicting.add(word)
                because[word].append(f"{judged.number} conflicts")
            elif judged.verdict == OBSOLETE:
                because[word].append(f"{judged.number} is obsolete")
    for name, word in sorted(known.WORDS.items()):
        if needed := sorted(conflicting.intersection(word.needs)):
            conflicting.add(name)
            because[name] += [f"needs {each}" for each in needed]
    errata: dict[str, list[tuple[str, Mapping[str, Any]]]] = defaultdict(list)
    for key, erratum in facts["errata"].items():
        errata[erratum["word"]].append((key, erratum))
    has = {fix: _has(errata[fix], Version(release)) for fix in known.FIXES}
    mended = {fix for fix, (state, _) in has.items() if state == MENDED}
    found = []
    for name in [*sorted(known.FEATURES), *sorted(known.FIXES)]:
        on_v2 = name in known.ON_V2
        if without_v1 and not on_v2:
            because[name].append("the release has no Model Runner V1")
        state = CONFLICT if name in conflicting else LOST if because[name] else LIVES
        upstream, since = has.get(name, ("", ""))
        todo = ""
        if upstream == MENDED:
            state, because[name] = MENDED, [f"the release has it {since}"]
            own = [each.number for each in patches if name in (served(each.patch) or ())]
            shared = [each.number for each in patches if (served(each.patch) or set()) - mended]
            dropped = ", ".join(number for number in own if number not in shared)
            todo = f"the fix {name} is mended ({since}): drop {dropped or 'its word'}"
        elif upstream == PARTLY:
            todo = f"the fix {name} is mended in part ({since}): read what is left of it"
        found.append(Word(name, state, tuple(because[name]), on_v2, todo))
    return found


def switch(words: Iterable[Word]) -> str:
    """Return the value of ``VLLM_READINESS`` that leaves out what conflicts or is gone."""
    return ",".join(f"-{word.name}" for word in words if word.state in (CONFLICT, LOST))


def _has(errata: Sequence[tuple[str, Mapping[str, Any]]], release: Version) -> tuple[str, str]:
    """Return what a release has of a fix of these errata, and since when; empty if nothing."""
    parts = [(erratum["mended"], name) for name, erratum in errata if "mended" in erratum]
    # A fix is mended with the last of its errata.
    last = max((Version(since) for since, _ in parts), default=release)
    if len(parts) == len(errata) > 0 and last <= release:
        return MENDED, f"since {last}"
    parts += [part for _, erratum in errata for part in erratum.get("partly", {}).items()]
    there = sorted((Version(since), text) for since, text in parts if Version(since) <= release)
    return PARTLY if there else "", "; ".join(f"{text} since {since}" for since, text in there)
