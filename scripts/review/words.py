"""Features and fixes on a release: what becomes of each word of ``VLLM_READINESS``.

A word lives if its patches merge, the functions that they stand in exist, and the model runner
that it serves is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from overlay.words import served

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

if TYPE_CHECKING:
    from review.mends import Found

#: States of a word, best first.
LIVES, MENDED, LOST, CONFLICT = "lives", "mended", "gone", "conflicts"
FEATURE, FIX = "feature", "fix"
#: What stands for the words of what all of them need.
FRAME = "frame"


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
