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

from overlay.patches import FilePatch, Hunk, Patch, Series, header_fields, split_lines
from series import git
from series.extents import enclosing
from series.upstream import Upstream

#: The verdicts, worst first.
CONFLICTS, OBSOLETE, MOVED, APPLIES = "conflicts", "obsolete", "moved", "applies"
#: The verdict on a hunk that is no longer needed: the release has its lines.
ADOPTED = "adopted"

_SAID = {
    APPLIES: "at the same line",
    MOVED: "at other lines",
    CONFLICTS: "in conflict",
    ADOPTED: "without effect, so likely adopted",
}

#: The length of git's conflict markers: no module has such long rows of these characters.
_MARKER = 31
_REGION = re.compile(
    rb"^<{%d} release\r?\n.*?^\|{%d} base\r?\n(?P<base>.*?)^={%d}\r?\n.*?^>{%d} overlay\r?\n"
    % ((_MARKER,) * 4),
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class JudgedHunk:
    """The verdict on a hunk.

    Attributes:
        path: of the file that it changes.
        verdict: :data:`APPLIES`, :data:`MOVED`, :data:`CONFLICTS` or :data:`ADOPTED`.
        was: its line in the pinned release with the earlier patches, one-based.
        now: its line in the new release with the earlier patches. If it conflicts, the line
            where its context is now; None if that is nowhere, or in several places.
        function: the function or class around it in the pinned release.
        release_function: the one around it in the new release; empty if it does not merge.
        conflict: the lines of the conflict, with git's marks; none if it merges.
        at: the first line of the conflict in the release, one-based; None if it merges.
    """

    path: str
    verdict: str
    was: int
    now: int | None
    function: str
    conflict: tuple[str, ...] = ()
    release_function: str = ""
    at: int | None = None


@dataclass(frozen=True)
class JudgedPatch:
    """The verdict on a patch, hunk by hunk, and the reason for it."""

    patch: Patch
    verdict: str
    because: str
    hunks: tuple[JudgedHunk, ...]

    @property
    def number(self) -> str:
        """The number that its name begins with."""
        return self.patch.name.partition("-")[0]

    @property
    def title(self) -> str:
        """The first line of its description."""
        return header_fields(self.patch.header).get("Description", "").partition("\n")[0]


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

    def add(self, patch: Patch) -> None:
        """Judge a patch, and merge it as far as that works."""
        hunks: list[JudgedHunk] = []
        step: dict[str, bytes] = {}
        conflicting = False
        for file in patch.files:
            path = file.path
            before, there = self.ours[path], self.result.texts[path]
            after = file.apply(before, patch.name)
            hunks += (self._hunk(path, hunk, before, there) for hunk in file.hunks)
            text, conflicts = merge_file(there, before, after)
            if conflicts:
                conflicting = True
                # Leave out conflicting hunks: the release's lines stay.
                self.result.marked[patch.name, path] = text
                text, _ = merge_file(there, before, after, favour="ours")
            step[path] = text
            self.ours[path] = after
        kinds = {hunk.verdict for hunk in hunks}
        verdict = OBSOLETE if kinds == {ADOPTED} else APPLIES if kinds == {APPLIES} else MOVED
        verdict = CONFLICTS if conflicting else verdict
        self.result.texts |= step
        self.result.steps.append(step)
        because = _because(verdict, hunks)
        self.result.patches.append(JudgedPatch(patch, verdict, because, tuple(hunks)))

    def _hunk(self, path: str, hunk: Hunk, before: bytes, there: bytes) -> JudgedHunk:
        alone = Hunk(hunk.old_at, hunk.old, hunk.old_at, hunk.new)
        after = FilePatch(path, (alone,)).apply(before, path)
        text, conflicts = merge_file(there, before, after)
        was = hunk.old_at + 1
        function = enclosing(before, was)
        if not conflicts:
            if text == there:
                return JudgedHunk(path, ADOPTED, was, None, function)
            now = _first_difference(there, text) + 1
            # Among equal lines a hunk may seem to be a little higher or lower than it is.
            seen = _first_difference(before, after) + 1
            verdict = APPLIES if now == seen else MOVED
            line = was + now - seen
            inside = enclosing(there, line)
            return JudgedHunk(path, verdict, was, line, function, release_function=inside)
        region = _REGION.search(text)
        assert region is not None
        return JudgedHunk(
            *(path, CONFLICTS, was, _once(there, split_lines(region["base"])), function),
            conflict=tuple(region[0].decode(errors="replace").splitlines()),
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


def _because(verdict: str, hunks: Sequence[JudgedHunk]) -> str:
    """Return how many hunks have which verdict, and where they conflict."""
    counts = Counter(hunk.verdict for hunk in hunks)
    total = f"{len(hunks)} hunk{'s' if len(hunks) > 1 else ''}"
    parts = [f"{number} of {total} {_SAID[each]}" for each, number in counts.items()]
    conflicts = [hunk for hunk in hunks if hunk.verdict == CONFLICTS]
    if where := sorted({hunk.function or "the module" for hunk in conflicts}):
        parts.append(f"the conflicts are in {', '.join(where)}")
    elif verdict == CONFLICTS:
        parts.append("together they conflict")
    return "; ".join(parts)


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
