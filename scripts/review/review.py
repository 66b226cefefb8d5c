"""The review of a release: every comparison made once, put together, and written."""

from __future__ import annotations

import datetime
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import Overlay
from overlay.words import MODULE, registry
from series import errata
from series.tree import write_file
from series.upstream import Upstream

from review import candidate, merging, model, report, requirements, runners, watch, words
from review.candidate import Candidate
from review.merging import Merged
from review.model import Change, Model
from review.requirements import Asked
from review.runners import Runners
from review.trying import FAILED, Step, summary
from review.wheels import Release
from review.words import Found, Word

#: The verdicts on a release, and the exit codes of ``--check``. Neither is a proof.
UNCHANGED, CHANGED, CONFLICT = "nothing watched has changed", "changed", "conflicts"
CODES = {UNCHANGED: 0, CHANGED: 10, CONFLICT: 11}

#: The files of a review.
MARKDOWN, CANDIDATE = "review.md", "candidate"

Trial = Callable[[Release, Mapping[str, bytes], bool], list[Step]]


@dataclass(frozen=True)
class Review:
    """The comparisons of a release with the pinned one.

    Attributes:
        overlay: the overlay, for the pinned release.
        release: the one under review.
        merged: the series on it.
        candidate: the overlay for it.
        lacking: sentences on patched files that the release lacks.
        taken: whether the release has a module in our package's place.
        changes: watched definitions that are not as they were.
        runners: the decisions which model runner serves.
        words: the state of each feature and fix.
        mends: by fix, what the release has of it.
        asked: requirements that are others.
        tried: the steps of the trial; none if it was not asked for.
        date: of the review, as 2026-11-23.
    """

    overlay: Overlay
    release: Release
    merged: Merged
    candidate: Candidate
    lacking: list[str]
    taken: bool
    changes: list[Change]
    runners: Runners
    words: list[Word]
    mends: Mapping[str, Found]
    asked: list[Asked]
    tried: list[Step] = field(default_factory=list)
    date: str = field(default_factory=lambda: datetime.date.today().isoformat())

    @property
    def conflicts(self) -> list[merging.JudgedPatch]:
        """The patches that conflict."""
        return [each for each in self.merged.patches if each.verdict == merging.CONFLICTS]

    @property
    def decisions(self) -> list[str]:
        """Sentences on all that a person must decide, but for conflicts and watched changes."""
        before, after = self.overlay.pin.release, self.release.version
        found = list(self.lacking)
        if self.taken:
            found.append(f"{after} has a module where the overlay puts its own, {PACKAGE}")
        if self.runners.without_v1:
            found.append(f"vLLM {after} has no Model Runner V1")
        elif self.runners.changed:
            found.append(f"the decision which model runner serves is not {before}'s")
        found += [f"the candidate is not ready: {fault}" for fault in self.candidate.faults]
        for judged in self.merged.patches:
            if judged.verdict == merging.OBSOLETE:
                found.append(f"{judged.number} is obsolete: {judged.because}")
            elif any(hunk.verdict == merging.ADOPTED for hunk in judged.hunks):
                found.append(f"{judged.number}: some of its hunks are in the release; check "
                             "whether the rest makes sense")  # fmt: skip
            found += [
                f"{judged.number}: a hunk for {hunk.function or 'the module'} of {hunk.path} "
                f"merges into {hunk.release_function}, at line {hunk.now}"
                for hunk in judged.hunks
                if hunk.now is not None and hunk.release_function not in ("", hunk.function)
            ]
        found += [
            f"the fix {each.name} is {each.state} ({each.because}): {each.todo}"
            for each in self.mends.values()
            if each.decide
        ]
        found += [
            f"the release asks for {each.now}; it was {each.was}"
            for each in self.asked
            if each.decide
        ]
        failed = [each for each in self.tried if each.outcome == FAILED]
        return found + [f"tried, and failed at {each.name}: {each.detail}" for each in failed]

    @property
    def verdict(self) -> str:
        """One of :data:`CODES`."""
        if self.conflicts or self.taken:
            return CONFLICT
        return CHANGED if self.changes or self.decisions else UNCHANGED

    @property
    def headline(self) -> str:
        """The verdict in one sentence, with the outcome of the trial."""
        parts = []
        if self.conflicts:
            names = ", ".join(each.number for each in self.conflicts)
            parts.append(f"{len(self.conflicts)} of {len(self.merged.patches)} patches conflict "
                         f"({names})")  # fmt: skip
        kinds = [each.kind for each in self.changes]
        first = sum(kind in model.DECIDE for kind in kinds)
        others = kinds.count(model.PATCHED)
        if watched := len(kinds) - others:
            parts.append(f"watched definitions that have changed: {watched}, {first} of which we "
                         "mirror or patch")  # fmt: skip
        if others:
            parts.append(f"other changes in the files that we patch: {others}")
        if self.decisions:
            parts.append(f"to decide: {len(self.decisions)}")
        if self.verdict == UNCHANGED:
            parts.append(UNCHANGED)
        return f"{'; '.join(parts)}; tried: {summary(self.tried)}"


def of_release(
    overlay: Overlay,
    base: Upstream,
    release: Release,
    folder: Path,
    trial: Trial | None = None,
) -> Review:
    """Review a release, and write the review.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        release: the other one, proven.
        folder: where a directory named after the release is made, or replaced at the end.
        trial: tries the candidate, as :func:`review.trying.examine` does.

    Raises:
        OverlayError: the overlay does not fit its own release, or git or ruff is not there.
    """
    gone = [path for path in overlay.targets if path not in release.upstream.paths]
    read = release.upstream.read  # a file that is gone is empty
    empty = replace(release.upstream, read=lambda path: b"" if path in gone else read(path))
    release = replace(release, upstream=empty)
    before, after = Model(base), Model(release.upstream)
    ours = (f"{PACKAGE}/", f"{PACKAGE}.py")
    taken = any(path.startswith(ours) for path in release.upstream.paths)
    merged = merging.merge(overlay.series, base, release.upstream)
    made = candidate.make(overlay, base, release, merged, taken)
    patches = merged.patches
    listed = watch.watch_list(overlay, patches, before)
    changes = watch.changes(listed, overlay, patches, (before, after))
    found = words.mends(errata.load(overlay.root), release.version, patches)
    decisions = runners.compare(before, after)
    known = registry(overlay) if MODULE in overlay.pin.result else None
    review = Review(
        overlay,
        release,
        merged,
        made,
        [_lacking(path, base, release.upstream) for path in gone],
        taken,
        changes,
        decisions,
        words.judge(known, patches, found, decisions.without_v1) if known else [],
        found,
        requirements.compare(base.metadata, release.upstream.metadata),
        trial(release, made.files, made.ready) if trial else [],
    )
    files = {f"{CANDIDATE}/{name}": data for name, data in made.files.items()}
    write(folder / release.version, report.markdown(review), files)
    return review


def _lacking(path: str, base: Upstream, release: Upstream) -> str:
    """Return a sentence on a file that is gone, with the new one that is most like it."""
    lines = set(base.read(path).split(b"\n"))
    new = set(release.paths) - set(base.paths)
    kept = {now: len(lines & set(release.read(now).split(b"\n"))) for now in new}
    like = max(sorted(kept), key=kept.__getitem__, default="")
    if like and 2 * kept[like] >= len(lines):
        return f"{path}: it is gone; most of its lines are in {like} now"
    return f"{path}: it is gone, and no new file is like it"


def write(final: Path, document: str, files: Mapping[str, bytes]) -> None:
    """Write a report and other files aside, and put them in place of an earlier review.

    Raises:
        OverlayError: there is something else.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_symlink() or (final.exists() and not (final / MARKDOWN).is_file()):
        raise OverlayError(
            Exit.USAGE,
            "is no review, and one is to be written there",
            subject=final,
            next_step="move it away, or name another directory with --out",
        )
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        aside, old = Path(scratch, "new"), Path(scratch, "old")
        write_file(aside / MARKDOWN, document.encode())
        for file, data in files.items():
            write_file(aside / file, data)
        if final.exists():
            final.rename(old)
        aside.rename(final)
