"""Features and fixes on a release: what becomes of each word of ``VLLM_READINESS``.

A word lives if its patches merge, the functions that they stand in exist, and the model runner
that it serves is there.
"""

from __future__ import annotations

import ast
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.patches import Patch
from overlay.pin import PACKAGE
from overlay.words import served

from review.merging import CONFLICTS, OBSOLETE, JudgedPatch

if TYPE_CHECKING:
    from review.mends import Found
    from review.model import Change

Words = frozenset[str]
NONE: Words = frozenset()

#: States of a word, best first.
LIVES, MENDED, LOST, CONFLICT = "lives", "mended", "gone", "conflicts"
FEATURE, FIX = "feature", "fix"
#: What stands for the words of what all of them need.
FRAME = "frame"
#: A module or patch that serves more words than these says nothing of one of them.
_FEW = 3

_REGISTRY = "registry.py"
#: Modules that serve no word of their own: the doors, the switch, the log line and the probe.
_SHARED = ("live", "registry", "feature", "version", "engine", "watch")
_OURS = PACKAGE.replace("/", ".")


@dataclass(frozen=True)
class Word:
    """A feature or fix on a release.

    Attributes:
        name: as ``VLLM_READINESS`` has it.
        group: :data:`FEATURE`, :data:`FIX` or :data:`FRAME`.
        state: one of :data:`LIVES` to :data:`CONFLICT`.
        because: the reasons, for people; none if it lives.
        read: names of watched definitions that it relies on and that have changed.
        on_v2: whether it works under Model Runner V2.
    """

    name: str
    group: str
    state: str
    because: tuple[str, ...]
    read: tuple[str, ...]
    on_v2: bool


class Vocabulary:
    """Which words our modules serve, by the runtime's registry.

    Args:
        folder: ``vendor_overlay`` of the overlay.

    Attributes:
        features: the words of features.
        fixes: the words of fixes.
        needs: word to those that it builds on.
        on_v2: the words that work under Model Runner V2.
    """

    def __init__(self, folder: Path) -> None:
        file = folder / PACKAGE / _REGISTRY
        declared = runpy.run_path(str(file)) if file.is_file() else {}
        self.features: Words = frozenset(declared.get("FEATURES", ()))
        self.fixes: Words = frozenset(declared.get("FIXES", ()))
        words = declared.get("WORDS", {})
        self.needs: dict[str, Words] = {name: frozenset(w.needs) for name, w in words.items()}
        self.on_v2: Words = frozenset(declared.get("ON_V2", ()))
        self._homes: dict[str, Words] = {}
        for name, word in words.items():
            for home in word.homes:
                module = home.partition(":")[0]
                self._homes[module] = self._homes.get(module, NONE) | {name}
        self._imports = dict(_imports(folder / PACKAGE))

    def of_module(self, name: str) -> Words:
        """Return the words of a module: its own, or those of the modules that import it.

        Args:
            name: its name below ``readiness``, or its path.
        """
        name = short(name)
        seen, new, words = {name}, [name], NONE
        while new:
            module = new.pop()
            if own := self._homes.get(module, NONE):
                words |= own
            elif module.partition(".")[0] not in _SHARED:
                users = {user for user, used in self._imports.items() if module in used} - seen
                seen |= users
                new += users
        return words


def of_patch(patch: Patch) -> Words:
    """Return the words that a patch serves; none for one that all words need."""
    return served(patch) or NONE


def judge(
    vocabulary: Vocabulary,
    patches: Sequence[JudgedPatch],
    changes: Iterable[Change],
    mends: Mapping[str, Found],
    without_v1: bool,
) -> list[Word]:
    """Return the state of every word, features first, and of what all words need.

    Args:
        vocabulary: of our modules.
        patches: the series on the release, judged.
        changes: watched definitions that have changed.
        mends: by fix, what the release has of it.
        without_v1: whether the release has no Model Runner V1.
    """
    if not vocabulary.features | vocabulary.fixes:
        return []
    because, conflicting = _reasons(vocabulary, patches)
    read = _to_read(vocabulary, patches, changes)
    found = []
    for name in [*sorted(vocabulary.features), *sorted(vocabulary.fixes), FRAME]:
        group = FRAME if name == FRAME else FEATURE if name in vocabulary.features else FIX
        on_v2 = name in vocabulary.on_v2 or name == FRAME
        if without_v1 and not on_v2:
            because[name].append("the release has no Model Runner V1")
        state = CONFLICT if name in conflicting else LOST if because[name] else LIVES
        if (has := mends.get(name)) and has.state == MENDED:
            state, because[name] = MENDED, [f"the release has it {has.because}"]
        found.append(Word(name, group, state, tuple(because[name]), tuple(read[name]), on_v2))
    return found


def _reasons(
    vocabulary: Vocabulary, patches: Iterable[JudgedPatch]
) -> tuple[dict[str, list[str]], set[str]]:
    """Return by word what has become of its patches, and the words that conflict."""
    because: dict[str, list[str]] = defaultdict(list)
    conflicting: set[str] = set()
    for judged in patches:
        for word in of_patch(judged.patch) or {FRAME}:
            if judged.verdict == CONFLICTS:
                conflicting.add(word)
                because[word].append(f"{judged.number} conflicts")
            elif judged.verdict == OBSOLETE:
                because[word].append(f"{judged.number} is obsolete")
    for name in sorted(vocabulary.needs):
        if needed := sorted(vocabulary.needs[name] & conflicting):
            conflicting.add(name)
            because[name] += [f"needs {each}" for each in needed]
    return because, conflicting


def _to_read(
    vocabulary: Vocabulary, patches: Iterable[JudgedPatch], changes: Iterable[Change]
) -> dict[str, dict[str, None]]:
    """Return by word the names of watched definitions that it relies on and that have changed.

    The seams of a patch that serves many words are left to the list of changes.
    """
    served = {judged.patch.name: of_patch(judged.patch) for judged in patches}
    read: dict[str, dict[str, None]] = defaultdict(dict)
    for change in changes:
        for user in change.users:
            words = served[user] if user in served else vocabulary.of_module(user)
            for word in words if len(words) <= _FEW else ():
                read[word][change.name] = None
    return read


def switch(words: Iterable[Word]) -> str:
    """Return the value of ``VLLM_READINESS`` that leaves out what conflicts or is gone."""
    out = [word.name for word in words if word.state in (CONFLICT, LOST) and word.group != FRAME]
    return ",".join(f"-{name}" for name in out)


def _imports(folder: Path) -> Iterator[tuple[str, set[str]]]:
    """Yield each of our modules, with those of ours that it imports."""
    for file in sorted(folder.rglob("*.py")):
        imported = set()
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_OURS):
                inner = short(node.module or "")
                imported |= {inner, *(f"{inner}.{a.name}".lstrip(".") for a in node.names)}
        yield short(file.relative_to(folder.parents[2]).as_posix()), imported


def short(name: str) -> str:
    """Return the name of one of our modules below the package, from its path or dotted name."""
    dotted = name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return dotted.removeprefix(_OURS).lstrip(".")
