"""Turn a diff that somebody has into a patch that can be laid down beside the series."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from overlay import merge
from overlay.errors import Exit, OverlayError, usage
from overlay.extras import no_python
from overlay.files import read
from overlay.patches import SERIES, Hunk, Series, parse
from overlay.source import Overlay

from series import diffs, git, places, tree
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
    folder = Path(os.path.realpath(extra))  # Path.resolve fails for a link to itself
    if folder == patches or patches in folder.parents:
        raise usage(
            "is the overlay's own series",
            "name a directory of your own: EXTRA=dir",
            subject=extra,
        )
    try:
        data = read(diff)
        if data.count(b"\r\n") == data.count(b"\n"):
            data = data.replace(b"\r\n", b"\n")
        others = Series.load(extra) if (extra / SERIES).exists() else Series([])
    except OSError as error:
        raise usage(
            f"cannot be read ({error.strerror})", "name a file: FILE=some.diff", error.filename
        ) from None
    found = diffs.read(data, str(diff))
    changes, left_out, warnings = _changes(found, overlay.series, others, upstream)
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
    content = f"{header}\n".encode(errors="replace") + changes  # a file's name may be no text
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
    found: diffs.Diff, series: Series, others: Series, upstream: Upstream
) -> tuple[bytes, list[str], list[str]]:
    """What the diff changes, without context lines; what it cannot; and warnings."""
    paths = set(upstream.paths)
    every = Series([*series.patches, *others.patches])
    left_out: list[str] = []
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for file in found.files:
        path = file.path
        reason = None if path in paths else "the pinned release has no such module"
        if reason := file.obstacle or reason:
            left_out.append(f"{path}: {reason}")
            continue
        if file.changes_mode:
            left_out.append(f"{path}: the change of its permissions")
        pristine = upstream.read(path)
        text = after[path] if path in after else every.apply(path, pristine)
        moves: Sequence[Hunk] | None = None
        if places.is_of(file, text):
            moves = ()
        elif path not in before and places.is_of(file, pristine):
            moves = merge.composed(every, path, pristine)
        before.setdefault(path, text)
        applied = places.apply(file.hunks, text, pristine, moves)
        left_out += [f"{path}, line {hunk.line}: {why}" for hunk, why in applied.left_out]
        after[path] = applied.data
    return _diff(before, after), left_out, list(_warnings(after))


def _diff(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> bytes:
    """A diff without context lines, and without git's headers."""
    if before == after:
        return b""
    with tempfile.TemporaryDirectory(prefix="overlay-import-") as scratch:
        folder = Path(scratch) / "tree"
        tree.lay_out(folder, "before", Upstream(tuple(sorted(before)), before.__getitem__), [])
        for path, data in after.items():
            (folder / path).write_bytes(data)
        return b"".join(bare(git.data(folder, "diff", *DIFF), after.__getitem__))


def _warnings(files: Mapping[str, bytes]) -> Iterator[str]:
    """What is wrong with the files afterwards; some hunks of a change may not do alone."""
    for path, data in files.items():
        if error := no_python(path, data):
            yield f"{path}: is no longer Python: {error}"
