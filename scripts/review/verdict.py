"""The comparisons of a release with the pinned one, and the verdict on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from overlay.source import Overlay

from review import merging, watch
from review.merging import JudgedPatch, Merged
from review.trying import FAILED, Step, summary
from review.watch import Change
from review.wheels import Release
from review.words import Word

#: The verdicts on a release, and the exit codes of ``--check``. Neither is a proof.
UNCHANGED, CHANGED, CONFLICT = "nothing watched has changed", "changed", "conflicts"
CODES = {UNCHANGED: 0, CHANGED: 10, CONFLICT: 11}


@dataclass(frozen=True)
class Review:
    """The comparisons of a release with the pinned one.

    Attributes:
        runners: :func:`review.runners.decision` of both releases.
        facts: sentences on what a person must decide that are in none of the others.
        candidate: the files of the overlay for it; none if it conflicts or is faulty.
        tried: the steps of the trial; none if it was not asked for.
    """

    overlay: Overlay
    release: Release
    merged: Merged
    changes: list[Change]
    runners: tuple[tuple[str, list[str]], ...]
    words: list[Word]
    facts: list[str]
    candidate: Mapping[str, bytes]
    tried: list[Step] = field(default_factory=list)

    @property
    def conflicts(self) -> list[JudgedPatch]:
        """The patches that conflict."""
        return [each for each in self.merged.patches if each.verdict == merging.CONFLICTS]

    @property
    def decisions(self) -> list[str]:
        """Sentences on all that a person must decide, but for conflicts and watched changes."""
        found = list(self.facts)
        obsolete = [each for each in self.merged.patches if each.verdict == merging.OBSOLETE]
        found += [f"{each.number} is obsolete: {each.because}" for each in obsolete]
        found += [word.todo for word in self.words if word.todo]
        failed = [each for each in self.tried if each.outcome == FAILED]
        return found + [f"tried, and failed at {each.name}: {each.detail}" for each in failed]

    @property
    def verdict(self) -> str:
        """Verdict on the release, of :data:`CODES`."""
        if self.conflicts:
            return CONFLICT
        return CHANGED if self.changes or self.decisions else UNCHANGED

    @property
    def headline(self) -> str:
        """The verdict in one sentence, with the outcome of the trial."""
        parts = []
        if self.conflicts:
            names = ", ".join(each.number for each in self.conflicts)
            number = f"{len(self.conflicts)} of {len(self.merged.patches)}"
            parts.append(f"{number} patches conflict ({names})")
        kinds = [each.kind for each in self.changes]
        if kinds:
            first = sum(map(kinds.count, watch.DECIDE))
            parts.append(f"watched definitions that have changed: {len(kinds)}, {first} of which "
                         "we mirror or patch")  # fmt: skip
        if self.decisions:
            parts.append(f"to decide: {len(self.decisions)}")
        return f"{'; '.join(parts) or UNCHANGED}; tried: {summary(self.tried)}"
