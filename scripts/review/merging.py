"""The series on another release, by git's three-way merges: a verdict on each patch and hunk.

The base of a merge is the pinned release with the earlier patches; one side adds the patch, the
other is the new release with the earlier patches. Each hunk is also merged alone, for its own
verdict. A hunk that conflicts is left out, and later patches are judged without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property

from overlay.errors import Exit, OverlayError
from overlay.patches import FilePatch, Hunk, Patch, Series, header_fields, split_lines
from series import git
from series.extents import enclosing, extents
from series.upstream import Upstream

#: The verdicts, worst first.
CONFLICTS, OBSOLETE, MOVED, APPLIES = "conflicts", "obsolete", "moved", "applies"
#: Verdicts on a hunk that is no longer needed: upstream does the same, or its lines are gone.
ADOPTED, GONE = "adopted", "gone"

#: A line shorter than this may be anywhere by chance.
_DISTINCTIVE = 8
#: The length of git's conflict markers: no module has such long rows of these characters.
_MARKER = 31
_REGION = re.compile(
    rb"^<{%d} release\r?\n(.*?)^\|{%d} base\r?\n(.*?)^={%d}\r?\n(.*?)^>{%d} overlay\r?\n"
    % ((_MARKER,) * 4),
    re.MULTILINE | re.DOTALL,
)
_DEFINED = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class JudgedHunk:
    """The verdict on a hunk.

    Attributes:
        verdict: :data:`APPLIES`, :data:`MOVED`, :data:`CONFLICTS`, :data:`ADOPTED` or
            :data:`GONE`.
        was: its line in the pinned release with the earlier patches, one-based.
        now: its line in the new release with the earlier patches. If it conflicts, the line
            where its context is now; None if that is nowhere, or in several places.
        function: the function or class around it in the pinned release.
        release_function: the one around it in the new release; empty if it does not merge.
        base: the lines that it removes. If it conflicts, all lines of the conflict in the
            pinned release.
        ours: the lines that it adds. If it conflicts, ``base`` with the hunk.
        theirs: the lines of the conflict in the new release.
        after: conflicting patches whose lines it changes.
        at: the first line of the conflict in the release, one-based; None if it merges.
    """

    verdict: str
    was: int
    now: int | None
    function: str
    base: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    release_function: str = ""
    at: int | None = None


@dataclass(frozen=True)
class JudgedFile:
    """The verdict on a patch in one file, hunk by hunk."""

    path: str
    verdict: str
    hunks: tuple[JudgedHunk, ...]


@dataclass(frozen=True)
class JudgedPatch:
    """The verdict on a patch, file by file, and the reason for it."""

    patch: Patch
    verdict: str
    because: str
    files: tuple[JudgedFile, ...]

    @property
    def number(self) -> str:
        """The number that its name begins with."""
        return self.patch.name.partition("-")[0]


@dataclass
class Merged:
    """The series on the new release.

    Attributes:
        patches: in their order.
        steps: for each patch, the files that it changes, with it; conflicting hunks are left out.
        texts: every file with the whole series on it, as far as it merges.
        marked: by patch and path, the conflicting merge, with git's conflict markers.
        overlaid: every file with the whole series on it, in the pinned release.
    """

    patches: list[JudgedPatch] = field(default_factory=list)
    steps: list[Mapping[str, bytes]] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    marked: dict[tuple[str, str], bytes] = field(default_factory=dict)
    overlaid: dict[str, bytes] = field(default_factory=dict)

    @property
    def conflicts(self) -> set[str]:
        """The files in which some patch conflicts."""
        return {path for _, path in self.marked}


def merge(series: Series, base: Upstream, release: Upstream) -> Merged:
    """Merge the series into another release, patch by patch.

    Args:
        series: the patches, for ``base``.
        base: the pinned release.
        release: the other release; it has every file that the series changes.

    Raises:
        OverlayError: git is not there, or a patch does not apply to ``base``.
    """
    merging = _Merging(series, base, release)
    for patch in series.patches:
        merging.add(patch)
    return merging.result


class _Merging:
    def __init__(self, series: Series, base: Upstream, release: Upstream) -> None:
        self.release = release
        self.ours = {path: base.read(path) for path in sorted(series.paths())}
        texts = {path: release.read(path) for path in self.ours}
        self.result = Merged(texts=texts, overlaid=self.ours)
        # The patch that each line of ours is from; empty for upstream's lines.
        self.origins = {path: [""] * len(split_lines(data)) for path, data in self.ours.items()}
        self.broken: set[str] = set()

    def add(self, patch: Patch) -> None:
        """Judge a patch, and merge it as far as that works."""
        files: list[JudgedFile] = []
        step: dict[str, bytes] = {}
        clean = True
        for file in patch.files:
            path = file.path
            before, there = self.ours[path], self.result.texts[path]
            after = file.apply(before, patch.name)
            hunks = tuple(self._hunk(path, hunk, before, there) for hunk in file.hunks)
            text, conflicts = merge_file(there, before, after)
            if conflicts:
                clean = False
                # Leave out conflicting hunks: the release's lines stay.
                self.result.marked[patch.name, path] = text
                text, _ = merge_file(there, before, after, favour="ours")
            verdict = _together([hunk.verdict for hunk in hunks], bool(conflicts))
            files.append(JudgedFile(path, verdict, hunks))
            step[path] = text
            self._follow(file, patch.name)
            self.ours[path] = after
        verdict = _together([hunk.verdict for file in files for hunk in file.hunks], not clean)
        if verdict == OBSOLETE:
            # An obsolete patch leaves no conflict to resolve.
            for path in step:
                self.result.marked.pop((patch.name, path), None)
            if any(hunk.verdict == GONE for file in files for hunk in file.hunks):
                self.broken.add(patch.name)
        elif verdict == CONFLICTS:
            self.broken.add(patch.name)
        self.result.texts |= step
        self.result.steps.append(step)
        self.result.patches.append(
            JudgedPatch(patch, verdict, _because(verdict, files), tuple(files))
        )

    def _hunk(self, path: str, hunk: Hunk, before: bytes, there: bytes) -> JudgedHunk:
        alone = Hunk(hunk.old_at, hunk.old, hunk.old_at, hunk.new)
        after = FilePatch(path, (alone,)).apply(before, path)
        text, conflicts = merge_file(there, before, after)
        was = hunk.old_at + 1
        function = enclosing(before, was)
        if not conflicts:
            removed, added = shown(hunk.old), shown(hunk.new)
            if text == there:
                return JudgedHunk(ADOPTED, was, None, function, removed, added)
            now = _first_difference(there, text) + 1
            # Among equal lines a hunk may seem to be a little higher or lower than it is.
            seen = _first_difference(before, after) + 1
            verdict = APPLIES if now == seen else MOVED
            line = was + now - seen
            return JudgedHunk(
                *(verdict, was, line, function, removed, added),
                release_function=enclosing(there, line),
            )
        region = _REGION.search(text)
        if region is None:
            raise OverlayError(
                Exit.FAULT,
                "git merge-file reports a conflict and shows none",
                subject=path,
                next_step="report it, with the release's name",
            )
        theirs, base, ours = (split_lines(part) for part in region.groups())
        # Only lines that the hunk removes count, not the lines around them.
        deleted = not any(map(bytes.strip, theirs)) and self._nowhere(hunk.old)
        gone = deleted or self._vanished(before, function, there)
        first, last = max(hunk.old_at - 1, 0), hunk.old_at + len(hunk.old) + 1
        after_these = {name for name in self.origins[path][first:last] if name in self.broken}
        return JudgedHunk(
            GONE if gone and not after_these else CONFLICTS,
            was,
            _once(there, base),
            function,
            shown(base),
            shown(ours),
            shown(theirs),
            tuple(sorted(after_these)),
            # Above the conflict, the merged text is the release's.
            at=self._located(path, there, text.count(b"\n", 0, region.start())),
        )

    def _located(self, path: str, there: bytes, at: int) -> int:
        """Return the line in the release of the zero-based line ``at`` of a merged text."""
        lines, release = split_lines(there), split_lines(self.release.read(path))
        line = at
        for start, other, size in SequenceMatcher(None, lines, release).get_matching_blocks():
            if start <= at:  # the last one is empty, and at the ends
                line = min(other + at - start, other + size) if size else line
        return line + 1

    def _vanished(self, before: bytes, function: str, there: bytes) -> bool:
        """Return whether nothing is left of a function: neither its name nor any of its lines."""
        if not function or function in {extent.name for extent in extents(there)}:
            return False
        extent = next(extent for extent in extents(before) if extent.name == function)
        lines = split_lines(before)[extent.first - 1 : extent.last]
        defined = function.rpartition(".")[2].encode() in self._names
        return not defined and self._nowhere(lines)

    def _nowhere(self, lines: Sequence[bytes]) -> bool:
        """Return whether no module of the release holds any of these lines.

        False if all lines are too short.
        """
        wanted = {line.strip() for line in lines if len(line.strip()) >= _DISTINCTIVE}
        if not wanted:
            return False
        texts = map(self.release.read, self.release.paths)
        return not any(
            line.strip() in wanted
            for text in texts
            if any(line in text for line in wanted)
            for line in split_lines(text)
        )

    @cached_property
    def _names(self) -> set[bytes]:
        """The names of all functions and classes of the release."""
        texts = map(self.release.read, self.release.paths)
        return {name for text in texts for name in _DEFINED.findall(text)}

    def _follow(self, file: FilePatch, name: str) -> None:
        """Bring the origins of the lines up to date."""
        origins = self.origins[file.path]
        for hunk in reversed(file.hunks):
            origins[hunk.old_at : hunk.old_at + len(hunk.old)] = [name] * len(hunk.new)


def merge_file(
    current: bytes, base: bytes, other: bytes, favour: str | None = None
) -> tuple[bytes, int]:
    """Merge three texts by ``git merge-file``.

    Args:
        current: the new release's side.
        base: the common ancestor.
        other: the overlay's side.
        favour: "ours" resolves conflicts in favour of ``current``.

    Returns:
        The merged text, and the number of conflicts in it.

    Raises:
        OverlayError: git is not there, or fails.
    """
    options = [f"--{favour}"] if favour else ["--diff3", f"--marker-size={_MARKER}"]
    files = {"release": current, "base": base, "overlay": other}
    labels = [part for name in files for part in ("-L", name)]
    return git.run(["merge-file", "--stdout", *options, *labels, *files], files, most=127)


def title(patch: Patch) -> str:
    """The first line of a patch's description."""
    return header_fields(patch.header).get("Description", "").partition("\n")[0]


def _together(verdicts: Sequence[str], conflicts: bool) -> str:
    """The verdict on several hunks."""
    if all(verdict in (ADOPTED, GONE) for verdict in verdicts):
        return OBSOLETE
    if conflicts:
        return CONFLICTS
    return APPLIES if set(verdicts) == {APPLIES} else MOVED


def _because(verdict: str, files: Sequence[JudgedFile]) -> str:
    hunks = [hunk for file in files for hunk in file.hunks]
    counts = Counter(hunk.verdict for hunk in hunks)
    total = f"{len(hunks)} hunk{'s' if len(hunks) > 1 else ''}"
    parts = []
    if verdict == APPLIES:
        return f"{total}, each at its line"
    if verdict == MOVED:
        parts += [f"{counts[MOVED]} of {total} at other lines"] if counts[MOVED] else []
        parts += [f"{counts[ADOPTED]} of {total} change nothing there"] if counts[ADOPTED] else []
        return ", ".join(parts) or f"{total}, merged together"
    if verdict == OBSOLETE:
        adopted, gone = counts[ADOPTED], counts[GONE]
        parts += [f"likely adopted: {adopted} of {total} change nothing there"] if adopted else []
        parts += [f"the lines of {gone} of {total} are gone"] if gone else []
        return "; ".join(parts)
    conflicts = [hunk for hunk in hunks if hunk.verdict in (CONFLICTS, GONE)]
    if not conflicts:
        return "the hunks conflict together"
    where = ", ".join(sorted({hunk.function or "the module" for hunk in conflicts}))
    after = sorted({name.partition("-")[0] for hunk in conflicts for name in hunk.after})
    text = f"{len(conflicts)} of {total} conflict, in {where}"
    return text + (f"; some of them with lines of {', '.join(after)}" if after else "")


def _first_difference(one: bytes, other: bytes) -> int:
    """The index of the first line in which two texts differ."""
    lines = split_lines(one), split_lines(other)
    pairs = enumerate(zip(*lines, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(map(len, lines)))


def _once(text: bytes, lines: Sequence[bytes]) -> int | None:
    """The line at which ``lines`` occur in a text exactly once, whatever their indentation."""
    wanted = [line.strip() for line in lines if line.strip()]
    numbered = [(n, line.strip()) for n, line in enumerate(split_lines(text), 1) if line.strip()]
    stripped = [line for _, line in numbered]
    size = len(wanted)
    starts = [n for n in range(len(stripped) - size + 1) if stripped[n : n + size] == wanted]
    return numbered[starts[0]][0] if size and len(starts) == 1 else None


def shown(lines: Sequence[bytes]) -> tuple[str, ...]:
    """Return lines as text, without their ends."""
    return tuple(line.decode(errors="replace").removesuffix("\n") for line in lines)
