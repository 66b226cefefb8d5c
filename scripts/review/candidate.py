"""The candidate: the series and the pin for a release, as far as the series merges, and its faults.

A merge of lines knows nothing of Python: the candidate is ready only if each file compiles, ruff
finds no undefined and no redefined name that neither the release nor the overlay has, and no name
that a patch puts into a module or class is one of the release's own there now.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import NAME as PIN
from overlay.source import Overlay
from series import refresh
from series.extents import extents
from series.tree import write_file
from series.upstream import Upstream

from review.merging import CONFLICTS, Merged
from review.model import ASSIGNED
from review.wheels import Release

#: ruff's rules: undefined names, a local variable read before it is set, and a definition that
#: replaces another one which nothing has used.
_RULES = "F821,F823,F811"


@dataclass(frozen=True)
class Candidate:
    """The overlay for a release.

    Attributes:
        files: by path; without a pin unless it is ready.
        faults: sentences on each fault, with its file and line.
        ready: whether nothing conflicts and nothing is faulty.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    ready: bool = False


def make(
    overlay: Overlay, base: Upstream, release: Release, merged: Merged, taken: bool
) -> Candidate:
    """Make the candidate.

    A patch that is obsolete is left out, and so is one that conflicts in every hunk. Another one
    that conflicts keeps its other hunks, and is named ``.incomplete``. The merges with git's
    conflict markers are in ``conflicts``.

    Args:
        overlay: the overlay.
        base: the pinned release.
        release: the one under review.
        merged: the series on it.
        taken: whether the release has a module in our package's place.

    Raises:
        OverlayError: ruff cannot be run, or git fails.
    """
    texts = {path: release.upstream.read(path) for path in merged.texts}
    kept = []
    for judged, step in zip(merged.patches, merged.steps, strict=True):
        # Of a patch that is obsolete, or conflicts everywhere, nothing is left.
        if any(texts[path] != data for path, data in step.items()):
            kept.append((judged, step))
        texts |= step
    archives = {**release.archives, release.wheel: release.sha256}
    commits = [(judged.patch.header, step) for judged, step in kept]
    written, pin = refresh.candidate(overlay, release.upstream, release.version, archives, commits)
    series = [name for name in written if name.endswith(".patch")]
    incomplete = {
        name for name, (judged, _) in zip(series, kept, strict=True) if judged.verdict == CONFLICTS
    }
    files = {
        f"{name}.incomplete" if name in incomplete else name: data for name, data in written.items()
    }
    # A file that is gone is empty.
    vendored = sorted(p for p in set(merged.texts) - merged.conflicts if merged.texts[p])
    files |= {f"vendor_overlay/{path}": merged.texts[path] for path in vendored}
    files |= {
        f"conflicts/{name.removesuffix('.patch')}/{path}": text
        for (name, path), text in merged.marked.items()
    }
    faults = tuple(_faults(merged, base, release.upstream))
    ready = not merged.conflicts and not faults and not taken
    if ready:
        files[PIN] = pin.dumps().encode()
    return Candidate(files, faults, ready)


def _faults(merged: Merged, base: Upstream, release: Upstream) -> Iterator[str]:
    theirs = {path: release.read(path) for path in sorted(set(merged.texts) - merged.conflicts)}
    changed = {path: merged.texts[path] for path in theirs if merged.texts[path] != theirs[path]}
    faults = {path: _syntax(path, text) for path, text in changed.items()}
    yield from filter(None, faults.values())
    whole = {path: text for path, text in changed.items() if not faults[path]}
    for path, text in whole.items():
        sides = (base.read(path), merged.overlaid[path], theirs[path])
        before, ours, there = map(_bound, sides)
        for name in sorted((ours - before) & (there - before)):
            # If the release has taken our lines over, the merge holds them once.
            last = name.rpartition(".")[2].encode()
            if text.count(last) > theirs[path].count(last):
                yield f"{path}: a patch puts {name} there, and the release has one of its own now"
    old: Counter[tuple[str, str]] = Counter()
    for side in (theirs, merged.overlaid):
        findings = _ruff({path: side[path] for path in whole})
        old |= Counter((path, _unnumbered(said)) for path, _, said in findings)
    for path, line, said in _ruff(whole):
        if old[path, _unnumbered(said)]:
            old[path, _unnumbered(said)] -= 1
        else:
            yield f"{path}, line {line}: {said}"


def _syntax(path: str, text: bytes) -> str:
    """Return a sentence if a module does not compile."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"{path}, line {getattr(error, 'lineno', 1)}: it does not compile: {error}"
    return ""


def _bound(text: bytes) -> set[str]:
    """Return the names of a module's functions and classes, and of the attributes that it sets."""
    assigned = ASSIGNED.findall(text.decode(errors="replace"))
    return {extent.name for extent in extents(text)} | set(assigned)


def _ruff(texts: Mapping[str, bytes]) -> Iterator[tuple[str, int, str]]:
    """Yield path, line and sentence of each of ruff's findings in these files."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    command += ["--exit-zero", "--select", _RULES, "--output-format", "json", "."]
    with tempfile.TemporaryDirectory(prefix="overlay-ruff-") as scratch:
        folder = Path(scratch).resolve()
        for path, text in texts.items():
            write_file(folder / path, text)
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OverlayError(
            Exit.FAULT,
            f"ruff cannot be run: {done.stderr.strip()}",
            next_step="run `make tools`, which installs it",
        )
    for entry in json.loads(done.stdout):
        # A syntax that ruff's Python has not was compiled above.
        if entry["code"] in _RULES.split(","):
            path = Path(entry["filename"]).relative_to(folder).as_posix()
            yield path, entry["location"]["row"], f"{entry['message']} ({entry['code']})"


def _unnumbered(text: str) -> str:
    return re.sub(r"\bline \d+", "line", text)
