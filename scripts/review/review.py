"""The review of a release: patches, names, candidate and warnings, put together and written."""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from overlay.errors import Exit, OverlayError
from overlay.patches import header_fields
from overlay.pin import NAME as PIN
from overlay.pin import PACKAGE
from overlay.source import Overlay
from series import refresh
from series.tree import write_file
from series.upstream import Upstream

from review import (
    fixes,
    markdown,
    merging,
    moves,
    page,
    reach,
    requirements,
    runners,
    running,
    soundness,
    sources,
    trying,
    verdicts,
)
from review.drift import changed_lines, drift
from review.fates import fates
from review.fixes import MENDS, Mend
from review.markdown import FileTexts
from review.merging import CONFLICTS, OBSOLETE, JudgedPatch, Merged
from review.uses import Use, upstream_uses
from review.wheels import Release

#: The version of review.json; docs/review-json.md has its fields, and says what raises it.
SCHEMA = 1
#: The verdicts on a release, and the exit codes of the program.
CLEAN, EYES, CONFLICT = "unchanged", "needs eyes", "conflicts"
CODES = {CLEAN: 0, EYES: 10, CONFLICT: 11}

#: What is the same in a release that is unchanged.
PROVEN = (
    "names, seams, mirrored definitions, callees two calls away, patched files and the classes "
    "that run"
)

#: The directory of the overlay's review against its own release.
OWN = "own"
#: The files of a review.
JSON, MARKDOWN, PAGE, CANDIDATE = "review.json", "review.md", "review.html", "candidate"

#: Added to the name of a review with conflicts that another one has replaced.
KEPT = "-before"
#: What differs between two reviews that say the same.
_RUN = ("command", "date")


def of_release(
    overlay: Overlay,
    base: Upstream,
    release: Release,
    folder: Path,
    uses: Iterable[Use] | None = None,
    own: bool = False,
    mends: Mapping[str, Mend] = MENDS,
    trial: Callable[[Release, Mapping[str, bytes], bool], list[dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Review a release, and write the review.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        release: the other one, proven.
        folder: where a directory named after the release is made, or replaced at the end.
        uses: the result of :func:`uses_of`, if it is known; it takes minutes.
        own: whether the release is the one that the overlay is for.
        mends: by fix, what upstream has of it.
        trial: tries the candidate, as :func:`review.trying.examine` does.

    Returns:
        The contents of review.json.

    Raises:
        OverlayError: the overlay does not fit its own release, or git is not there.
    """
    moved = moves.examine(overlay, base, release.upstream)
    pinned, original = overlay, base
    overlay, base, upstream = moves.relocated(overlay, base, release.upstream, moved)
    release = replace(release, upstream=upstream)
    merged = merging.merge(overlay.series, base, release.upstream)
    overlaid = moves.original(merged.overlaid, moved)
    if uses is None:
        uses = uses_of(pinned, original, overlaid)
    uses = list(uses)
    names = fates(uses, original, release.upstream)
    found = sources.examine(pinned, original, release.upstream, uses, names)
    faults = soundness.examine(merged, base, release.upstream)
    asked = [] if own else requirements.examine(base.metadata, upstream.metadata)
    faulty = bool(faults) or moves.is_taken(moved)
    candidate, files = _candidate(overlay, release, merged, faulty)
    tried = trial(release, files, candidate["ready"]) if trial else []
    judged = [] if own else fixes.judge(mends, release.version, merged.patches)
    runs = running.NOTHING
    if not own:
        runs = running.examine(
            pinned, original, release, merged.patches, overlaid, uses, names, judged, found
        )
    warnings = [
        *runners.warnings(runs["runners"]),
        *reach.warnings(runs["classes"]),
        *verdicts.warnings(runs["words"]),
        *_warnings(merged, names),
        *fixes.warnings(judged),
        *sources.warnings(found),
        *moves.warnings(moved),
        *soundness.warnings(faults),
        *requirements.warnings(asked),
        *trying.warnings(tried),
    ]
    verdict = _verdict(merged.patches, names, warnings)
    review: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "make diff" if own else release.command + " TRY=1" * bool(trial),
        "date": datetime.date.today().isoformat(),
        "base": {"release": overlay.pin.release, "overlay": overlay.pin.overlay},
        "own": own,
        "patches": [_patch(judged) for judged in merged.patches],
        "release": {
            "version": release.version,
            "wheel": release.wheel,
            "sha256": release.sha256,
            "proof": release.proof,
        },
        "verdict": CONFLICT if moves.is_taken(moved) else verdict,
        "proven": PROVEN,
        **runs,
        "fixes": judged,
        "targets": [_target(path, base, release.upstream) for path in overlay.targets],
        "names": names,
        **found,
        "candidate": candidate,
        "soundness": faults,
        "moves": moved,
        "requirements": asked,
        "tried": tried,
        "warnings": warnings,
    }
    review = json.loads(json.dumps(review))  # with lists for tuples
    texts = _texts(overlay, base, release.upstream, merged)
    _write(folder, OWN if own else release.version, review, texts, {} if own else files)
    return review


def of_itself(overlay: Overlay, base: Upstream, folder: Path) -> dict[str, Any]:
    """Show the overlay against the release that it is for, in the same form.

    Raises:
        OverlayError: it does not fit that release.
    """
    release = Release(overlay.pin.release, "", "", "VERSION_PIN", base)
    return of_release(overlay, base, release, folder, uses=(), own=True)


def uses_of(overlay: Overlay, base: Upstream, overlaid: Mapping[str, bytes]) -> list[Use]:
    """The names of upstream's that our modules and seams use; this takes minutes.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        overlaid: by path, the files that the patches change, with the whole series applied.
    """
    seams = {path: changed_lines(base.read(path), data) for path, data in overlaid.items()}
    with tempfile.TemporaryDirectory(prefix="overlay-review-") as scratch:
        tree = Path(scratch) / "site"
        for path in base.paths:
            write_file(tree / path, overlaid.get(path) or base.read(path))
        for file in sorted((overlay.root / "vendor_overlay" / PACKAGE).rglob("*.py")):
            write_file(tree / file.relative_to(overlay.root / "vendor_overlay"), file.read_bytes())
        return upstream_uses(tree, base, seams)


def _patch(judged: JudgedPatch) -> dict[str, Any]:
    files = [asdict(file) for file in judged.files]
    for hunk in (hunk for file in files for hunk in file["hunks"]):
        hunk["lands"] = hunk.pop("release_function")
    return {
        "name": judged.patch.name,
        "title": merging.title(judged.patch),
        "header": header_fields(judged.patch.header),
        "verdict": judged.verdict,
        "because": judged.because,
        "files": files,
    }


def _target(path: str, base: Upstream, release: Upstream) -> dict[str, Any]:
    """Upstream's own changes to a file that the patches change."""
    changed = drift(base.read(path), release.read(path))
    functions = [{"name": name, "fate": fate} for name, fate in changed.functions]
    return {
        "path": path,
        "added": changed.added,
        "removed": changed.removed,
        "functions": functions,
    }


def _candidate(
    overlay: Overlay, release: Release, merged: Merged, faulty: bool
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The series for the release, and its files.

    A patch that is obsolete is left out, and so is one that conflicts in every hunk. Another one
    that conflicts keeps its other hunks, and is named ``.incomplete``. The merges with git's
    conflict markers are in ``conflicts``. There is a pin if nothing
    conflicts, and nothing is faulty.
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
    ready = not merged.conflicts and not faulty
    if ready:
        files[PIN] = pin.dumps().encode()
    candidate = {
        "patches": [Path(name).name for name in series if name not in incomplete],
        "vendored": vendored,
        "pin": ready,
        "ready": ready,
        "conflicts": sorted(merged.conflicts),
    }
    return candidate, files


def _texts(
    overlay: Overlay, base: Upstream, release: Upstream, merged: Merged
) -> dict[str, FileTexts]:
    return {
        path: FileTexts(
            base=base.read(path).decode(errors="replace"),
            release=release.read(path).decode(errors="replace"),
            overlaid=merged.overlaid[path].decode(errors="replace"),
            candidate=None
            if path in merged.conflicts
            else merged.texts[path].decode(errors="replace"),
        )
        for path in overlay.targets
    }


def _verdict(
    patches: Sequence[JudgedPatch], names: Sequence[Mapping[str, Any]], warnings: Sequence[str]
) -> str:
    if any(patch.verdict == CONFLICTS for patch in patches):
        return CONFLICT
    changed = any(name["fate"] != "same" for name in names)
    return EYES if changed or warnings else CLEAN


def _warnings(merged: Merged, names: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for judged in merged.patches:
        number = judged.patch.name.partition("-")[0]
        if judged.verdict == OBSOLETE:
            when = header_fields(judged.patch.header).get("Drop-When", "").replace("\n", " ")
            yield f"{number} is obsolete: {judged.because}. Its Drop-When field: {when}"
        for file in judged.files:
            for hunk in file.hunks:
                if hunk.now is not None and hunk.release_function not in ("", hunk.function):
                    yield (
                        f"{number}: a hunk for {hunk.function or 'the module'} of {file.path} "
                        f"merges into {hunk.release_function}, at line {hunk.now}"
                    )
        hunks = [hunk for file in judged.files for hunk in file.hunks]
        unneeded = sum(hunk.verdict in (merging.ADOPTED, merging.GONE) for hunk in hunks)
        if unneeded and judged.verdict != OBSOLETE:
            yield (
                f"{number}: {unneeded} of its hunks are in the release already, or their lines are "
                "gone; check whether the rest still makes sense"
            )
    changed = sorted(
        name["name"].rpartition("vllm.")[2]
        for name in names
        if "holds a seam" in name["how"] and name["fate"] != "same"
    )
    if changed:
        yield (
            f"{len(changed)} functions that hold a seam have changed: read the whole function, "
            f"even where the patch applies: {', '.join(changed)}"
        )


def _write(
    folder: Path,
    name: str,
    review: Mapping[str, Any],
    texts: Mapping[str, FileTexts],
    candidate: Mapping[str, bytes],
) -> None:
    """Write a review aside, and put it in place of an earlier one.

    One with conflicts stays beside it, unless it said the same: somebody may be resolving them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    old = aside.with_name(f"{aside.name}.old")
    final = folder / name
    try:
        aside.chmod(0o755)
        write_file(aside / JSON, (json.dumps(review, indent=1) + "\n").encode())
        write_file(aside / MARKDOWN, markdown.report(review).encode())
        document = markdown.document(review, texts)
        write_file(aside / PAGE, page.render(markdown.title(review), document).encode())
        for file, data in candidate.items():
            write_file(aside / CANDIDATE / file, data)
        if final.is_symlink() or (final.exists() and not (final / JSON).is_file()):
            raise OverlayError(
                Exit.USAGE,
                "is no review, and one is to be written there",
                subject=final,
                next_step="move it away, or name another directory with --out",
            )
        if final.exists():
            final.rename(old)
        aside.rename(final)
        if old.exists() and _has_other_conflicts(old / JSON, review):
            kept = folder / f"{name}{KEPT}"
            shutil.rmtree(kept, ignore_errors=True)
            old.rename(kept)
    finally:
        if old.exists() and not final.exists():
            old.rename(final)
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)


def _has_other_conflicts(file: Path, review: Mapping[str, Any]) -> bool:
    """Whether an earlier review has conflicts, and does not say the same as this one."""
    try:
        earlier = json.loads(file.read_text())
    except ValueError:
        return False
    if not isinstance(earlier, dict) or earlier.get("verdict") != CONFLICT:
        return False
    return any(earlier.get(key) != value for key, value in review.items() if key not in _RUN)
