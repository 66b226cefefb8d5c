"""Review of a release: makes each comparison once, and writes the report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.pin import PACKAGE
from overlay.source import Overlay
from packaging.version import Version
from series import errata
from series.tree import write_file
from series.upstream import Upstream

from review import candidate, merging, report, runners, watch, words
from review.model import Model, shape
from review.requirements import asked
from review.trying import Step
from review.verdict import Review
from review.wheels import Release

#: The files of a review.
MARKDOWN, CANDIDATE = "review.md", "candidate"


def of_release(
    overlay: Overlay,
    base: Upstream,
    release: Release,
    folder: Path,
    trial: Callable[[Release, Mapping[str, bytes]], list[Step]] | None = None,
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
    facts = [f"{path}: it is gone; `make rebase` may find where to" for path in gone]
    read = release.upstream.read  # a file that is gone is empty
    empty = replace(release.upstream, read=lambda path: b"" if path in gone else read(path))
    release = replace(release, upstream=empty)
    before, after = Model(base), Model(release.upstream)
    ours = (f"{PACKAGE}/", f"{PACKAGE}.py")
    without_v1 = runners.RUNNER in base.paths and runners.RUNNER not in release.upstream.paths
    decisions = tuple(runners.decision(side) for side in (before, after))
    had, has = (list(map(shape, parts)) for _, parts in decisions)
    if without_v1:
        facts.append(f"vLLM {release.version} has no Model Runner V1")
    if had != has:
        facts.append(f"the decision which model runner serves is not {overlay.pin.release}'s")
    was, now = (asked(each.metadata) for each in (base, release.upstream))
    others = [name for name in was if was[name] != now[name]]
    facts += [f"the release asks for {n} {now[n]}; it was {was[n]}" for n in others]
    merged = merging.merge(overlay.series, base, release.upstream)
    faults = candidate.faults(release, merged)
    if any(path.startswith(ours) for path in release.upstream.paths):
        faults.append(f"the release has a module where the overlay puts its own, {PACKAGE}")
    facts += [f"the candidate is not ready: {fault}" for fault in faults]
    ready = not (merged.conflicts or faults)
    made = candidate.make(overlay, release, merged) if ready else {}
    listed = watch.watch_list(overlay, merged.patches, before)
    upstream = errata.load(overlay.root)
    if Version(release.version) > Version(upstream["read"]):
        facts.append(f"mends are known up to {upstream['read']}: read the release for those since")
    review = Review(
        overlay,
        release,
        merged,
        watch.changes(listed, before, after),
        decisions,
        words.judge(overlay, merged.patches, upstream, release.version, without_v1),
        facts,
        made,
        trial(release, made) if trial else [],
    )
    files = {f"{CANDIDATE}/{name}": data for name, data in made.items()}
    _write(folder / release.version, {MARKDOWN: report.markdown(review).encode(), **files})
    return review


def _write(final: Path, files: Mapping[str, bytes]) -> None:
    """Write files aside, and put them in place of an earlier review."""
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_symlink() or (final.exists() and not (final / MARKDOWN).is_file()):
        raise OverlayError(
            Exit.USAGE,
            "is no review, and one is to be written there",
            subject=final,
            next_step="move it away, or name another directory with --out",
        )
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as scratch:
        for name, data in files.items():
            write_file(Path(scratch, "new", name), data)
        if final.exists():
            final.rename(Path(scratch, "old"))
        Path(scratch, "new").rename(final)
