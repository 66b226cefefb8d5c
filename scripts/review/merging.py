"""The series on another release, by git's three-way merges: a verdict on each patch.

The base of a merge is the pinned release with the earlier patches; one side adds the patch, the
other is the new release with the earlier patches. A hunk that conflicts is left out, and later
patches are judged without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from overlay.errors import OverlayError
from overlay.patches import Patch, Series, header_fields
from series import git
from series.extents import enclosing
from series.upstream import Upstream

#: The verdicts, worst first.
CONFLICTS, OBSOLETE, MOVED, APPLIES = "conflicts", "obsolete", "moved", "applies"

#: The length of git's conflict markers: no module has such long rows of these characters.
_MARKER = 31
_REGION = re.compile(
    rb"^<{%d} release\r?\n.*?^>{%d} overlay\r?\n" % ((_MARKER,) * 2), re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class JudgedPatch:
    """The verdict on a patch.

    Attributes:
        patch: the patch.
        verdict: :data:`CONFLICTS` to :data:`APPLIES`.
        functions: the paths and functions that it changes in the pinned release.
        conflicts: path and lines of each conflict, with git's marks; none if it merges.
        step: the files that it changes in the release, with it; conflicting hunks are left out.
    """

    patch: Patch
    verdict: str
    functions: tuple[tuple[str, str], ...] = ()
    conflicts: tuple[tuple[str, str], ...] = ()
    step: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def number(self) -> str:
        """The number that its name begins with."""
        return self.patch.name.partition("-")[0]

    @property
    def title(self) -> str:
        """The first line of its description."""
        return header_fields(self.patch.header).get("Description", "").partition("\n")[0]

    @property
    def because(self) -> str:
        """Reason for the verdict."""
        if self.verdict == OBSOLETE:
            return "merged, it changes nothing, so the release likely has it"
        return f"in {', '.join(sorted({name or 'the module' for _, name in self.functions}))}"


@dataclass
class Merged:
    """The series on the new release.

    Attributes:
        patches: in their order.
        texts: every file with the whole series on it, as far as it merges.
        overlaid: every file with the whole series on it, in the pinned release.
    """

    patches: list[JudgedPatch] = field(default_factory=list)
    texts: dict[str, bytes] = field(default_factory=dict)
    overlaid: dict[str, bytes] = field(default_factory=dict)

    @property
    def conflicts(self) -> set[str]:
        """The files in which some patch conflicts."""
        return {path for judged in self.patches for path, _ in judged.conflicts}


def merge(series: Series, base: Upstream, release: Upstream) -> Merged:
    """Merge the series into a release, which has every file that it changes.

    Raises:
        OverlayError: git is not there, or fails.
    """
    result = Merged()
    paths = sorted(series.paths())
    result.texts |= {path: release.read(path) for path in paths}
    result.overlaid |= {path: base.read(path) for path in paths}
    for patch in series.patches:
        judged = _judge(patch, result)
        result.patches.append(judged)
        result.texts |= judged.step
        result.overlaid |= {f.path: f.apply(result.overlaid[f.path], "") for f in patch.files}
    return result


def _judge(patch: Patch, sofar: Merged) -> JudgedPatch:
    step: dict[str, bytes] = {}
    functions: list[tuple[str, str]] = []
    marked: list[tuple[str, str]] = []
    moved = False
    for file in patch.files:
        path, before, there = file.path, sofar.overlaid[file.path], sofar.texts[file.path]
        after = file.apply(before, patch.name)
        text, conflicts = _merge_file(there, before, after)
        if conflicts:
            marked += [(path, found.decode(errors="replace")) for found in _REGION.findall(text)]
            # Leave out conflicting hunks: the release's lines stay.
            text, _ = _merge_file(there, before, after, "--ours")
        step[path] = text
        functions += [(path, enclosing(before, hunk.old_at + 1)) for hunk in file.hunks]
        try:
            moved |= file.apply(there, patch.name) != text
        except OverlayError:
            moved = True
    same = all(sofar.texts[path] == text for path, text in step.items())
    verdict = CONFLICTS if marked else OBSOLETE if same else MOVED if moved else APPLIES
    return JudgedPatch(patch, verdict, tuple(dict.fromkeys(functions)), tuple(marked), step)


def _merge_file(current: bytes, base: bytes, other: bytes, *favour: str) -> tuple[bytes, int]:
    """Return the merge of three texts by ``git merge-file``, and the number of its conflicts."""
    options = favour or ("--diff3", f"--marker-size={_MARKER}")
    files = {"release": current, "base": base, "overlay": other}
    labels = [part for name in files for part in ("-L", name)]
    return git.run(["merge-file", "--stdout", *options, *labels, *files], files, most=127)
