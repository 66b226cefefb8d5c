"""Write patches/ and VERSION_PIN from build/edit, and docs/errata.md."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from overlay import pin as pins
from overlay.errors import Exit, OverlayError, damaged
from overlay.files import holds
from overlay.patches import SERIES, Series
from overlay.pin import sha256
from overlay.source import Overlay

from series import catalogue, errata, git, tree
from series.checksums import expected_pin, patch_digests
from series.commits import series_of
from series.tree import EDIT, PRISTINE, write_file
from series.upstream import Upstream


def refresh(root: Path, dry_run: bool) -> list[str]:
    """Write patches/ and VERSION_PIN from ``build/edit``, and the page of errata.

    Without that tree the patches stay, and VERSION_PIN follows our own modules. The paths of the
    files written or removed are returned.

    Raises:
        OverlayError: the tree has uncommitted changes, a commit without the DEP-3
            fields, or one that does more than change upstream's modules.
    """
    folder = root / EDIT
    pin = pins.loads((root / pins.NAME).read_text())
    if not folder.exists():
        series = Series.load(root / "patches")
        expected = expected_pin(root, pin, series, None)
        if patch_digests(expected) != patch_digests(pin):
            raise OverlayError(
                Exit.USAGE,
                "differs from VERSION_PIN, and the new checksums can only be had from build/edit",
                subject=root / "patches",
                next_step="run `make edit`, and then `make refresh`",
            )
        page = {f"patches/{catalogue.NAME}": catalogue.page(series)}
        return _save(root, page, expected, dry_run)
    _refuse_unready(folder, root)
    pin = tree.pin_of_release(folder, pin)
    files, series = series_of(folder)

    def upstream(path: str) -> bytes:
        return git.data(folder, "show", f"{PRISTINE}:{path}")

    for path in sorted(series.paths()):
        if pin.upstream.get(path, sha256(upstream(path))) != sha256(upstream(path)):
            raise damaged("the tree's pristine file is not the pinned one; lay it out anew", path)
        if series.apply(path, upstream(path)) != git.data(folder, "show", f"HEAD:{path}"):
            raise damaged("the patches do not give what the tree holds", path)
    written = _save(root, files, expected_pin(root, pin, series, upstream, files), dry_run)
    if not dry_run:
        tree.note_saved(folder, root)
    return written


def _refuse_unready(folder: Path, root: Path) -> None:
    """Raise unless everything in the tree is committed to a series on its release."""
    branch = git.text(folder, "rev-parse", "--symbolic-full-name", "HEAD")
    if branch != "refs/heads/series" or not tree.is_laid_out(folder):
        raise OverlayError(
            Exit.BUSY,
            "is not on its branch `series`: a rebase is under way, or `make edit` was cut off",
            subject=folder,
            next_step="finish it (`git rebase --continue`, `git checkout series`), or delete the "
            "directory, run `make edit` again, and then `make refresh`",
        )
    if dirty := git.text(folder, "status", "--porcelain"):
        raise OverlayError(
            Exit.USAGE,
            f"has uncommitted changes: {dirty.splitlines()[0][3:]}",
            subject=folder,
            next_step="commit them (`git commit --amend`, or --fixup and `git rebase "
            f"--interactive --autosquash {PRISTINE}`) and run `make refresh` again",
        )
    if not tree.patches_unchanged(folder, root):
        raise OverlayError(
            Exit.BUSY,
            "has changed since `make edit`; refresh would overwrite that",
            subject=root / "patches",
            next_step="put your commits aside (`git format-patch saved` in build/edit), delete "
            "build/edit, run `make edit` and take them up again",
        )
    if git.text(folder, "merge-base", PRISTINE, "HEAD") != git.text(folder, "rev-parse", PRISTINE):
        raise OverlayError(
            Exit.BUSY,
            "is not based on its release: a rebase was given up",
            subject=folder,
            next_step="delete the directory and run `make edit` or `make rebase` again",
        )


def candidate(
    overlay: Overlay,
    release: Upstream,
    version: str,
    archives: Mapping[str, str],
    commits: Iterable[tuple[str, Mapping[str, bytes]]],
) -> tuple[dict[str, bytes], pins.Pin]:
    """The files of ``patches/`` and the pin for another release, as `make refresh` writes them.

    Our own modules are those of ``overlay``. ``archives`` maps its wheels' names to
    SHA-256. ``commits`` has each patch's header, and the files that it changes, afterwards.

    Raises:
        OverlayError: git is not installed, or a commit cannot be a patch.
    """
    commits = list(commits)
    paths = {path for _, changed in commits for path in changed}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tree.lay_out(folder, version, Upstream(tuple(sorted(paths)), release.read), commits)
        files, series = series_of(folder)
    pin = pins.Pin(version, overlay.pin.overlay, archives, {}, {})
    return files, expected_pin(overlay.root, pin, series, release.read, files)


def _save(root: Path, files: dict[str, bytes], pin: pins.Pin, dry_run: bool) -> list[str]:
    files |= {pins.NAME: pin.dumps().encode(), **errata.pages(root)}
    present = {f"patches/{file.name}" for file in tree.generated(root)}
    gone = sorted(present - set(files)) if f"patches/{SERIES}" in files else []
    changed = [name for name, data in sorted(files.items()) if not holds(root / name, data)]
    if not dry_run:
        for name in changed:
            write_file(root / name, files[name])
        for name in gone:
            (root / name).unlink()
    return changed + [f"{name} (removed)" for name in gone]
