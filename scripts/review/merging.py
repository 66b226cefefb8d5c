"""What becomes of each patch on another release, by three-way merges of git's.

For a patch, the base is the pinned release with the patches before it, one side is the same
with the patch, the other side is the new release with the patches before it. Each hunk is also
merged by itself, which tells hunks of one file apart. Where a hunk conflicts it is left out, and
the patches behind it are judged without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from overlay.errors import Exit, OverlayError
from overlay.patches import FilePatch, Hunk, Patch, Series, header_fields, split_lines
from series import git
from series.upstream import Upstream

from review.outline import Extent, around, extents

#: The verdicts, worst first.
CONFLICTS, OBSOLETE, MOVED, APPLIES = "conflicts", "obsolete", "moved", "applies"
#: Those of a hunk that is not needed any more: upstream does the same, or its lines are gone.
ADOPTED, GONE = "adopted", "gone"

#: Longer than any row of such characters in a module.
_MARKER = 31
#: A line shorter than this stands anywhere by chance.
_TELLING = 8
_REGION = re.compile(
    rb"^<{%d} release\r?\n(.*?)^\|{%d} base\r?\n(.*?)^={%d}\r?\n(.*?)^>{%d} overlay\r?\n"
    % ((_MARKER,) * 4),
    re.MULTILINE | re.DOTALL,
)
_DEFINED = re.compile(rb"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)", re.MULTILINE)


@dataclass(frozen=True)
class Judged:
    """What becomes of a hunk.

    Attributes:
        verdict: :data:`APPLIES`, :data:`MOVED`, :data:`CONFLICTS`, :data:`ADOPTED` or
            :data:`GONE`.
        was: its line in the pinned release with the patches before it, from 1.
        now: its line in the new release with the patches before it; of one that conflicts,
            where its lines are now, if they are there once.
        function: what it stands in.
        lands: what it stands in there; of one that does not merge, the same as ``function``.
        base: of one that conflicts, the pinned release's text of the region, in lines; else
            the lines that it takes out.
        ours: the same with the hunk; else the lines that it puts in.
        theirs: the new release's text of the region.
        after: patches whose lines it changes, and which conflict themselves.
    """

    verdict: str
    was: int
    now: int | None
    function: str
    base: tuple[str, ...]
    ours: tuple[str, ...]
    theirs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    lands: str = ""


@dataclass(frozen=True)
class JudgedFile:
    """What becomes of a patch in one file, hunk by hunk."""

    path: str
    verdict: str
    hunks: tuple[Judged, ...]


@dataclass(frozen=True)
class JudgedPatch:
    """What becomes of a patch, file by file, and why the verdict is what it is."""

    patch: Patch
    verdict: str
    because: str
    files: tuple[JudgedFile, ...]


@dataclass
class Merged:
    """The series on the new release.

    Attributes:
        patches: in their order.
        steps: for each patch, the files that it changes, afterwards; where it conflicts,
            without the hunks that do.
        texts: every file with the whole series on it, as far as it merges.
        conflicts: files that some patch conflicts in.
        marked: by patch and path, the merge that conflicts, with git's marks.
        overlaid: every file with the whole series on it, in the pinned release.
    """

    patches: list[JudgedPatch] = field(default_factory=list)
    steps: list[Mapping[str, bytes]] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)
    marked: dict[tuple[str, str], bytes] = field(default_factory=dict)
    overlaid: dict[str, bytes] = field(default_factory=dict)


def merge(series: Series, base: Upstream, release: Upstream) -> Merged:
    """Put the series on another release, patch by patch.

    Args:
        series: the patches, for ``base``.
        base: the pinned release.
        release: the other one; it has every file that the series changes.

    Raises:
        OverlayError: git is not there, or a patch does not apply to ``base``.
    """
    return _Merging(series, base, release).merged()


class _Merging:
    def __init__(self, series: Series, base: Upstream, release: Upstream) -> None:
        self.series = series
        self.release = release
        self.ours = {path: base.read(path) for path in sorted(series.paths())}
        self.result = Merged(texts={path: release.read(path) for path in self.ours})
        # The patch that each line of ours is from; empty where it is upstream's.
        self.origins = {path: [""] * len(split_lines(data)) for path, data in self.ours.items()}
        self.broken: set[str] = set()
        self._names: set[bytes] | None = None

    def merged(self) -> Merged:
        for patch in self.series.patches:
            self._patch(patch)
        self.result.overlaid = self.ours
        return self.result

    def _patch(self, patch: Patch) -> None:
        files: list[JudgedFile] = []
        step: dict[str, bytes] = {}
        clean = True
        for file in patch.files:
            path = file.path
            before, there = self.ours[path], self.result.texts[path]
            after = file.apply(before, patch.name)
            hunks = tuple(self._hunks(file, before, there))
            text, conflicts = merge_file(there, before, after)
            if conflicts:
                clean = False
                # Hunks that conflict are left out: theirs is what the release has.
                self.result.marked[patch.name, path] = text
                text, _ = merge_file(there, before, after, favour="ours")
                self.result.conflicts.add(path)
            verdict = _together([hunk.verdict for hunk in hunks], bool(conflicts))
            files.append(JudgedFile(path, verdict, hunks))
            step[path] = text
            self._follow(file, patch.name)
            self.ours[path] = after
        verdict = _together([hunk.verdict for file in files for hunk in file.hunks], not clean)
        if verdict == OBSOLETE:
            # What is not needed is no conflict.
            for path in step:
                self.result.marked.pop((patch.name, path), None)
            if any(hunk.verdict == GONE for file in files for hunk in file.hunks):
                self.broken.add(patch.name)
            self.result.conflicts = {path for _, path in self.result.marked}
        elif verdict == CONFLICTS:
            self.broken.add(patch.name)
        self.result.texts |= step
        self.result.steps.append(step)
        self.result.patches.append(
            JudgedPatch(patch, verdict, _because(verdict, files), tuple(files))
        )

    def _hunks(self, file: FilePatch, before: bytes, there: bytes) -> Iterator[Judged]:
        found = extents(before.decode(errors="replace"))
        later = extents(there.decode(errors="replace"))
        for hunk in file.hunks:
            yield self._hunk(file.path, hunk, before, there, (found, later))

    def _hunk(
        self,
        path: str,
        hunk: Hunk,
        before: bytes,
        there: bytes,
        defined: tuple[list[Extent], list[Extent]],
    ) -> Judged:
        alone = Hunk(hunk.old_at, hunk.old, hunk.old_at, hunk.new)
        after = FilePatch(path, (alone,)).apply(before, path)
        text, conflicts = merge_file(there, before, after)
        was = hunk.old_at + 1
        function = around(defined[0], min(was, before.count(b"\n") or 1))
        if not conflicts:
            removed, put = _lines(hunk.old), _lines(hunk.new)
            if text == there:
                return Judged(ADOPTED, was, None, function, removed, put)
            now = _first_difference(there, text) + 1
            # Equal lines around a hunk let it be seen a little higher or lower than it is.
            at = _first_difference(before, after) + 1
            verdict = APPLIES if now == at else MOVED
            line = was + now - at
            lands = around(defined[1], min(line, there.count(b"\n") or 1))
            return Judged(verdict, was, line, function, removed, put, lands=lands)
        region = _REGION.search(text)
        if region is None:
            raise OverlayError(
                Exit.FAULT,
                "git merge-file reports a conflict and shows none",
                subject=path,
                next_step="report it, with the release's name",
            )
        theirs, base, ours = (split_lines(part) for part in region.groups())
        now_at = _once(there, base)
        # Of lines that the hunk takes out; those that it is put beside are not its own.
        deleted = not any(map(bytes.strip, theirs)) and self._nowhere(hunk.old)
        gone = deleted or self._vanished(before, function, defined)
        first, last = max(hunk.old_at - 1, 0), hunk.old_at + len(hunk.old) + 1
        after_these = {name for name in self.origins[path][first:last] if name in self.broken}
        return Judged(
            GONE if gone and not after_these else CONFLICTS,
            was,
            now_at,
            function,
            _lines(base),
            _lines(ours),
            _lines(theirs),
            tuple(sorted(after_these)),
        )

    def _vanished(
        self, before: bytes, function: str, defined: tuple[list[Extent], list[Extent]]
    ) -> bool:
        """Whether nothing is left of a function: no such name, and none of its lines."""
        if not function or function in {each.name for each in defined[1]}:
            return False
        (span, *_) = (each for each in defined[0] if each.name == function)
        lines = split_lines(before)[span.first - 1 : span.last]
        return not self._elsewhere(function) and self._nowhere(lines)

    def _nowhere(self, lines: Sequence[bytes]) -> bool:
        """Whether no module of the release holds any of these lines; no, if they say little."""
        wanted = {line.strip() for line in lines if len(line.strip()) >= _TELLING}
        if not wanted:
            return False
        for path in self.release.paths:
            data = self.release.read(path)
            if any(line in data for line in wanted) and any(
                line.strip() in wanted for line in split_lines(data)
            ):
                return False
        return True

    def _elsewhere(self, function: str) -> bool:
        """Whether any module of the release defines something by that name."""
        if self._names is None:
            self._names = set()
            for path in self.release.paths:
                self._names.update(_DEFINED.findall(self.release.read(path)))
        return function.rpartition(".")[2].encode() in self._names

    def _follow(self, file: FilePatch, name: str) -> None:
        """Bring the origins of the lines up to date."""
        origins = self.origins[file.path]
        for hunk in reversed(file.hunks):
            origins[hunk.old_at : hunk.old_at + len(hunk.old)] = [name] * len(hunk.new)


def merge_file(
    current: bytes, base: bytes, other: bytes, favour: str | None = None
) -> tuple[bytes, int]:
    """What ``git merge-file`` makes of three texts, and how many conflicts are in it.

    Args:
        current: the new release's side.
        base: what both come from.
        other: the overlay's side.
        favour: "ours" settles conflicts for ``current``.

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
    """The verdict of several hunks."""
    if all(verdict in (ADOPTED, GONE) for verdict in verdicts):
        return OBSOLETE
    if conflicts:
        return CONFLICTS
    return APPLIES if set(verdicts) == {APPLIES} else MOVED


def _because(verdict: str, files: Sequence[JudgedFile]) -> str:
    hunks = [hunk for file in files for hunk in file.hunks]

    def counted(word: str) -> int:
        return sum(hunk.verdict == word for hunk in hunks)

    number = len(hunks)
    whole = f"{number} hunk{'s' if number > 1 else ''}"
    adopted, gone, moved = counted(ADOPTED), counted(GONE), counted(MOVED)
    if verdict == APPLIES:
        return f"{whole}, each at its line"
    if verdict == MOVED:
        parts = [f"{moved} of {whole} at other lines"] if moved else []
        parts += [f"{adopted} of {whole} in the release already"] if adopted else []
        return ", ".join(parts) or f"{whole}, merged together"
    if verdict == OBSOLETE:
        parts = [f"the release does the same in {adopted} of {whole}"] if adopted else []
        parts += [f"the lines of {gone} of {whole} are gone"] if gone else []
        return "; ".join(parts)
    conflicts = [hunk for hunk in hunks if hunk.verdict in (CONFLICTS, GONE)]
    where = sorted({hunk.function or "the module" for hunk in conflicts})
    text = f"{len(conflicts)} of {whole} conflict" if conflicts else "the hunks conflict together"
    text += f", in {', '.join(where)}" if where else ""
    after = sorted({name.partition("-")[0] for hunk in conflicts for name in hunk.after})
    return text + (f"; some of them with lines of {', '.join(after)}" if after else "")


def _lines(lines: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(line.decode(errors="replace").removesuffix("\n") for line in lines)


def _first_difference(one: bytes, other: bytes) -> int:
    """The index of the first line in which two texts differ."""
    pairs = zip(split_lines(one), split_lines(other), strict=False)
    same = 0
    for left, right in pairs:
        if left != right:
            break
        same += 1
    return same


def _once(text: bytes, lines: Sequence[bytes]) -> int | None:
    """The line at which ``lines`` stand in a text, whatever their indentation, if just once."""
    wanted = [line.strip() for line in lines if line.strip()]
    there = [(at, line.strip()) for at, line in enumerate(split_lines(text), 1) if line.strip()]
    bare = [line for _, line in there]
    size = len(wanted)
    if not size:
        return None
    starts = [n for n in range(len(bare) - size + 1) if bare[n : n + size] == wanted]
    return there[starts[0]][0] if len(starts) == 1 else None
