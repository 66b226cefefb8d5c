"""A review: everything known about a release, put together and written out."""

from __future__ import annotations

import datetime
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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

from review import markdown, merging, names, page
from review.drift import changed_lines, drift
from review.merging import CONFLICTS, OBSOLETE, JudgedPatch, Merged
from review.sides import Texts
from review.wheels import Release

#: The verdicts on a release, and what the program ends with.
CLEAN, EYES, CONFLICT = "clean", "needs eyes", "conflicts"
CODES = {CLEAN: 0, EYES: 10, CONFLICT: 11}

#: The directory of the overlay's review against its own release.
OWN = "own"
#: What is written.
JSON, MARKDOWN, PAGE, CANDIDATE = "review.json", "review.md", "review.html", "candidate"


def of_release(overlay: Overlay, base: Upstream, release: Release, folder: Path) -> dict[str, Any]:
    """Review a release, and write what is found.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        release: the other one, proven.
        folder: where a directory of the release's name is made, or replaced when all is done.

    Returns:
        What review.json says.

    Raises:
        OverlayError: the overlay does not fit its own release, or git is not there.
    """
    merged = merging.merge(overlay.series, base, release.upstream)
    found = _described(overlay, release.version, merged)
    used = _names(overlay, base, release.upstream, merged)
    candidate, files = _candidate(overlay, release, merged)
    warnings = list(_warnings(merged, used))
    texts = _texts(overlay, base, release.upstream, merged)
    drifts = [drift(path, base.read(path), release.upstream.read(path)) for path in overlay.targets]
    found |= {
        "release": {
            "version": release.version,
            "wheel": release.wheel,
            "sha256": release.sha256,
            "proof": release.proof,
        },
        "verdict": _verdict(merged.patches, used, warnings),
        "targets": [
            {
                "path": each.path,
                "added": each.added,
                "removed": each.removed,
                "functions": [{"name": name, "fate": fate} for name, fate in each.functions],
            }
            for each in drifts
        ],
        "names": used,
        "candidate": candidate,
        "warnings": warnings,
    }
    _write(folder, release.version, found, texts, files)
    return found


def of_itself(overlay: Overlay, base: Upstream, folder: Path) -> dict[str, Any]:
    """Show the overlay against the release that it is for, in the same form.

    Raises:
        OverlayError: it does not fit that release.
    """
    merged = merging.merge(overlay.series, base, base)
    version = overlay.pin.release
    found = _described(overlay, version, merged) | {
        "command": "make diff",
        "own": True,
        "release": {"version": version, "wheel": "", "sha256": "", "proof": "VERSION_PIN"},
        "verdict": CLEAN,
        "targets": [
            {"path": path, "added": 0, "removed": 0, "functions": []} for path in overlay.targets
        ],
        "names": [],
        "candidate": {
            "patches": [patch.name for patch in overlay.series.patches],
            "vendored": overlay.targets,
            "pin": True,
            "conflicts": [],
        },
        "warnings": [],
    }
    _write(folder, OWN, found, _texts(overlay, base, base, merged), {})
    return found


def _described(overlay: Overlay, version: str, merged: Merged) -> dict[str, Any]:
    """What is said of every review: its heading, and the patches."""
    return {
        "schema": 1,
        "command": f"make review RELEASE={version}",
        "date": datetime.date.today().isoformat(),
        "base": {"release": overlay.pin.release, "overlay": overlay.pin.overlay},
        "own": False,
        "patches": [_patch(each) for each in merged.patches],
    }


def _patch(judged: JudgedPatch) -> dict[str, Any]:
    return {
        "name": judged.patch.name,
        "title": merging.title(judged.patch),
        "header": header_fields(judged.patch.header),
        "verdict": judged.verdict,
        "because": judged.because,
        "files": [
            {
                "path": file.path,
                "verdict": file.verdict,
                "hunks": [
                    {
                        "verdict": hunk.verdict,
                        "was": hunk.was,
                        "now": hunk.now,
                        "function": hunk.function,
                        "lands": hunk.lands,
                        "base": list(hunk.base),
                        "ours": list(hunk.ours),
                        "theirs": list(hunk.theirs),
                    }
                    for hunk in file.hunks
                ],
            }
            for file in judged.files
        ],
    }


def _names(
    overlay: Overlay, base: Upstream, release: Upstream, merged: Merged
) -> list[dict[str, Any]]:
    """What our modules and seams rely on, and what became of it."""
    seams = {path: changed_lines(base.read(path), data) for path, data in merged.overlaid.items()}
    with tempfile.TemporaryDirectory(prefix="overlay-review-") as scratch:
        tree = Path(scratch) / "site"
        for path in base.paths:
            write_file(tree / path, merged.overlaid.get(path) or base.read(path))
        for file in sorted((overlay.root / "vendor_overlay" / PACKAGE).rglob("*.py")):
            write_file(tree / file.relative_to(overlay.root / "vendor_overlay"), file.read_bytes())
        used = names.relied_on(tree, base, seams)
    return names.fates(used, base, release)


def _candidate(
    overlay: Overlay, release: Release, merged: Merged
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the series would be for the release, and the files of it.

    A patch that is obsolete is not in it, nor one that conflicts in every hunk. Another one that
    conflicts is there without the hunks that do, under a name that says so. Beside them lie the
    merges with git's marks.
    """
    texts = {path: release.upstream.read(path) for path in merged.texts}
    kept = []
    for judged, step in zip(merged.patches, merged.steps, strict=True):
        # Of a patch that is obsolete, or conflicts everywhere, nothing is left.
        if any(texts[path] != data for path, data in step.items()):
            kept.append((judged, step))
        texts |= step
    archives = {release.wheel: release.sha256}
    commits = [(judged.patch.header, step) for judged, step in kept]
    made, pin = refresh.candidate(overlay, release.upstream, release.version, archives, commits)
    series = [name for name in made if name.endswith(".patch")]
    broken = {
        name for name, (judged, _) in zip(series, kept, strict=True) if judged.verdict == CONFLICTS
    }
    files = {f"{name}.incomplete" if name in broken else name: made[name] for name in made}
    vendored = sorted(set(merged.texts) - merged.conflicts)
    files |= {f"vendor_overlay/{path}": merged.texts[path] for path in vendored}
    files |= {
        f"conflicts/{name.removesuffix('.patch')}/{path}": text
        for (name, path), text in merged.marked.items()
    }
    if not merged.conflicts:
        files[PIN] = pin.dumps().encode()
    described = {
        "patches": [Path(name).name for name in series if name not in broken],
        "vendored": vendored,
        "pin": not merged.conflicts,
        "conflicts": sorted(merged.conflicts),
    }
    return described, files


def _texts(overlay: Overlay, base: Upstream, release: Upstream, merged: Merged) -> dict[str, Texts]:
    def text(data: bytes) -> str:
        return data.decode(errors="replace")

    return {
        path: Texts(
            base=text(base.read(path)),
            release=text(release.read(path)),
            overlaid=text(merged.overlaid[path]),
            candidate=None if path in merged.conflicts else text(merged.texts[path]),
        )
        for path in overlay.targets
    }


def _verdict(
    patches: Sequence[JudgedPatch], used: Sequence[Mapping[str, Any]], warnings: Sequence[str]
) -> str:
    verdicts = {patch.verdict for patch in patches}
    if CONFLICTS in verdicts:
        return CONFLICT
    changed = any(name["fate"] != "same" for name in used)
    return EYES if changed or warnings else CLEAN


def _warnings(merged: Merged, used: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for judged in merged.patches:
        number = judged.patch.name.partition("-")[0]
        if judged.verdict == OBSOLETE:
            when = header_fields(judged.patch.header).get("Drop-When", "").replace("\n", " ")
            yield f"{number} is obsolete: {judged.because}. It is to go: {when}"
        adopted = sum(
            hunk.verdict in (merging.ADOPTED, merging.GONE)
            for file in judged.files
            for hunk in file.hunks
        )
        for file in judged.files:
            for hunk in file.hunks:
                if hunk.now is not None and hunk.lands != hunk.function and hunk.lands:
                    yield (
                        f"{number}: what it puts into {hunk.function or 'the module'} of "
                        f"{file.path} comes to stand in {hunk.lands}, at line {hunk.now}"
                    )
        if adopted and judged.verdict != OBSOLETE:
            yield (
                f"{number}: {adopted} of its hunks are in the release already, or their lines are "
                "gone; see whether what is left still makes sense"
            )
    seams = [each["name"] for each in used if "holds a seam" in each["how"]]
    changed = [each["name"] for each in used if each["fate"] != "same"]
    if both := sorted(set(seams) & set(changed)):
        yield (
            f"{len(both)} functions that hold a seam have changed: read the whole function, even "
            f"where the patch applies: {', '.join(name.rpartition('vllm.')[2] for name in both)}"
        )


def _write(
    folder: Path,
    name: str,
    found: Mapping[str, Any],
    texts: Mapping[str, Texts],
    files: Mapping[str, bytes],
) -> None:
    """Write a review aside, and put it in place of what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder))
    old = aside.with_name(f"{aside.name}.old")
    try:
        aside.chmod(0o755)
        write_file(aside / JSON, (json.dumps(found, indent=1) + "\n").encode())
        write_file(aside / MARKDOWN, markdown.render(found).encode())
        write_file(aside / PAGE, page.render(found, texts).encode())
        for file, data in files.items():
            write_file(aside / CANDIDATE / file, data)
        final = folder / name
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
    finally:
        if old.exists() and not final.exists():
            old.rename(final)
        for left in (aside, old):
            shutil.rmtree(left, ignore_errors=True)
