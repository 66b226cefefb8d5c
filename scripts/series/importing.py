"""Turn a diff that somebody has into a patch that can be laid down beside the series."""

from __future__ import annotations

import ast
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from overlay.errors import Exit, OverlayError, usage
from overlay.patches import SERIES, Series, parse
from overlay.source import Overlay

from series import diffs, git, tree
from series.commits import DIFF, bare, slug
from series.headers import empty_fields, skeleton
from series.upstream import Upstream


@dataclass(frozen=True)
class Imported:
    """The result of an import.

    Attributes:
        file: the patch that was written.
        left_out: what of the diff is not in it: place and reason, each a sentence.
        warnings: what to look at in it.
        empty: the fields of its header that are to be filled in.
    """

    file: Path
    left_out: list[str]
    warnings: list[str]
    empty: list[str]


def import_patch(
    overlay: Overlay, upstream: Upstream, diff: Path, extra: Path, dry_run: bool
) -> Imported:
    """Write a patch of those hunks of a diff that apply, and list it in ``extra/series``.

    It begins where the series and the patches that are in ``extra`` already have ended.

    Args:
        overlay: the overlay.
        upstream: the files of the pinned release.
        diff: the diff, as git writes it.
        extra: the directory of patches that are not the overlay's own.
        dry_run: whether to write nothing.

    Raises:
        OverlayError: the diff cannot be read, nothing of it applies, or ``extra`` is no place
            for it.
    """
    patches = (overlay.root / "patches").resolve()
    if extra.resolve() == patches or patches in extra.resolve().parents:
        raise usage(
            "is the overlay's own series",
            "name a directory of your own: EXTRA=dir",
            subject=extra,
        )
    try:
        data = diff.read_bytes()
        if data.count(b"\r\n") == data.count(b"\n"):
            data = data.replace(b"\r\n", b"\n")
        others = Series.load(extra) if (extra / SERIES).exists() else Series([])
    except OSError as error:
        raise usage(
            f"cannot be read ({error.strerror})", "name a file: FILE=some.diff", error.filename
        ) from None
    found = diffs.read(data, str(diff))

    def before(path: str) -> bytes:
        return others.apply(path, overlay.series.apply(path, upstream.read(path)))

    changes, left_out, warnings = _changes(found, upstream, before)
    if not changes:
        raise OverlayError(
            Exit.USAGE,
            "; ".join(["nothing of it can be taken over", *left_out]),
            subject=diff,
            next_step="nothing was written; for a hunk whose lines differ, make the change by "
            "hand on the pinned files",
        )
    header = _header(found, diff)
    number = 1 + max(
        (int(n) for p in others.patches if (n := p.name.partition("-")[0]).isdecimal()), default=0
    )
    title = slug(header.partition("\n")[0].removeprefix("Description:")) or "imported"
    file = extra / f"{number:04}-{title}.patch"
    content = f"{header}\n".encode() + changes
    parse(file.name, content)  # it has to be one that `make apply` can read
    if not dry_run:
        _save(file, content)
    return Imported(file, left_out, warnings, empty_fields(header))


def _save(file: Path, content: bytes) -> None:
    """Write a patch, and then list it; a file that is in its place stays."""
    if file.exists():
        raise usage(
            "is there, and is not listed in the file `series` beside it",
            "list it, or move it away, and import again",
            subject=file,
        )
    tree.write_file(file, content)
    listing = file.parent / SERIES
    listed = listing.read_bytes() if listing.exists() else b""
    gap = b"\n" if listed and not listed.endswith(b"\n") else b""
    listing.write_bytes(listed + gap + f"{file.name}\n".encode())


def _header(found: diffs.Diff, diff: Path) -> str:
    known = {"Description": diff.stem}
    if found.mails:
        subjects = [subject for subject, _, _ in found.mails]
        texts = [text for _, _, text in found.mails if text]
        lines = [*subjects, *"\n\n".join(texts).splitlines()]
        authors = dict.fromkeys(author for _, author, _ in found.mails if author)
        known = {"Description": "\n".join(lines), "Author": ", ".join(authors)}
    return skeleton(known, foreign=True)


def _changes(
    found: diffs.Diff, upstream: Upstream, before: Callable[[str], bytes]
) -> tuple[bytes, list[str], list[str]]:
    """What the diff changes, without context lines; what it cannot; and warnings."""
    paths = set(upstream.paths)
    left_out: list[str] = []
    usable: list[diffs.FileDiff] = []
    for file in found.files:
        reason = None if file.path in paths else "the pinned release has no such module"
        if reason := file.obstacle or reason:
            left_out.append(f"{file.path}: {reason}")
        else:
            usable.append(file)
            if file.changes_mode:
                left_out.append(f"{file.path}: the change of its permissions")
    touched = sorted({file.path for file in usable})
    texts = {path: before(path) for path in touched}
    with tempfile.TemporaryDirectory(prefix="overlay-import-") as scratch:
        folder = Path(scratch) / "tree"
        tree.lay_out(folder, "before", Upstream(tuple(touched), texts.__getitem__), [])
        for file in usable:
            left_out += _apply(folder, file, upstream)
        changes = b"".join(bare(git.data(folder, "diff", *DIFF))) if touched else b""
        after = {path: (folder / path).read_bytes() for path in touched}
    return changes, left_out, list(_warnings(after))


def _apply(folder: Path, file: diffs.FileDiff, upstream: Upstream) -> Iterator[str]:
    """Apply the hunks of a file that can be. Yields: which can not, and why."""
    head = f"--- a/{file.path}\n+++ b/{file.path}\n".encode()
    rejects = folder / f"{file.path}.rej"
    text = head + b"".join(hunk.text for hunk in file.hunks)
    if _git_apply(folder, text, "--reject"):
        return
    if not rejects.exists():
        raise usage("git cannot read this part of the diff", "get the diff anew", subject=file.path)
    rejected = rejects.read_bytes()
    rejects.unlink()
    with tempfile.TemporaryDirectory(prefix="overlay-import-") as scratch:
        pristine = Path(scratch)
        tree.write_file(pristine / file.path, upstream.read(file.path))
        for hunk in file.hunks:
            if hunk.text not in rejected:
                continue
            alone = head + hunk.text
            reason = "its lines are not those of the pinned release"
            if _git_apply(folder, alone, "--check", "--reverse"):
                reason = "is there already"
            elif _git_apply(pristine, alone, "--check"):
                reason = "a patch of the overlay, or one before it, has changed its lines"
            yield f"{file.path}, line {hunk.line}: {reason}"


def _git_apply(folder: Path, diff: bytes, *options: str) -> bool:
    """Run ``git apply``. Returns: whether all of the diff applies."""
    return (
        git.call(
            folder,
            ["apply", "--whitespace=nowarn", *options, "-"],
            diff,
            succeeded=lambda code: code in (0, 1),
            next_step="get the diff anew",
        )[1]
        == 0
    )


def _warnings(files: Mapping[str, bytes]) -> Iterator[str]:
    """What is wrong with the files afterwards; some hunks of a change may not do alone."""
    for path, data in files.items():
        try:
            ast.parse(data)
        except (SyntaxError, ValueError) as error:
            yield f"{path}: is no longer Python: {error}"
