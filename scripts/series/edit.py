"""Lay out the series as commits in build/edit, on its own release or on another."""

from __future__ import annotations

import datetime
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from overlay.errors import Exit, OverlayError, usage
from overlay.source import Overlay

from series import git, tree
from series.check import FIELDS, unlisted
from series.commits import LONGEST_SLUG, slug
from series.tree import EDIT, PRISTINE
from series.upstream import Upstream


def edit(
    overlay: Overlay, upstream: Upstream, dry_run: bool, patch_name: str | None = None
) -> list[str]:
    """Lay out upstream's modules in a git tree, with a commit for each patch; return its path.

    ``upstream`` is the pinned release. The next commit's message in the tree begins with the header
    of a patch named ``patch_name``, which has no number.

    Raises:
        OverlayError: the tree holds work that `make refresh` has not written out,
            a patch does not apply, or the new patch cannot have that name.
    """
    if patch_name is not None:
        _refuse_name(overlay, patch_name)
    folder = overlay.root / EDIT
    if folder.exists() and tree.holds_work(folder):
        raise OverlayError(
            Exit.BUSY,
            "holds changes that are not in patches/",
            subject=folder,
            next_step="commit them there and run `make refresh`, or delete the directory",
        )
    if drafts := unlisted(overlay.root, overlay.series):
        raise OverlayError(
            Exit.BUSY,
            "is not listed in patches/series, and refresh would remove it",
            subject=overlay.root / "patches" / drafts[0],
            next_step="list it, or put it somewhere else, and run `make edit` again",
        )
    texts = {path: upstream.read(path) for path in sorted(overlay.series.paths())}
    commits: list[tuple[str, dict[str, bytes]]] = []
    for patch in overlay.series.patches:
        changed = {f.path: f.apply(texts[f.path], patch.name) for f in patch.files}
        texts |= changed
        commits.append((patch.header, changed))
    if not dry_run:
        tree.lay_out(folder, f"vLLM {overlay.pin.release}, pristine", upstream, commits)
        tree.note_saved(folder, overlay.root)
        if patch_name is not None:
            title = patch_name.replace("-", " ").capitalize()
            tree.begin_message(folder, _header(title))
    return [EDIT]


def _header(description: str) -> str:
    """A header for the author to complete: all fields but Description and Last-Update are empty."""
    texts = {"Description": description, "Last-Update": datetime.date.today().isoformat()}
    return "".join(f"{name}: {texts.get(name, '')}".rstrip() + "\n" for name in FIELDS)


def _refuse_name(overlay: Overlay, name: str) -> None:
    """Raise unless a new patch can have that name, which is its Description in other letters."""
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name) or slug(name) != name:
        raise usage(
            "is not the name of a patch",
            "write the first line of its Description in small letters and digits, with hyphens "
            f"between words and at most {LONGEST_SLUG} characters, as in PATCH=keep-rows-apart",
            subject=repr(name),
        )
    for patch in overlay.series.patches:
        if patch.name.partition("-")[2] == f"{name}.patch":
            raise usage(
                f"is the name of patches/{patch.name}",
                "choose another name; or run `make edit` without PATCH, and change that patch's "
                "commit in build/edit",
                subject=repr(name),
            )


def rebase(
    overlay: Overlay,
    upstream: Upstream,
    release: Upstream,
    version: str,
    archives: Mapping[str, str],
) -> list[str]:
    """Lay out the series as :func:`edit` does, and rebase it onto another release with git.

    Patches that merge are committed, and patches whose change the release already holds are
    dropped. git stops at a patch that conflicts, as in any rebase, for the author to resolve; the
    files that conflict in it are returned. `make refresh` afterwards writes patches/ and
    VERSION_PIN for that release. ``archives`` maps its wheels' names to SHA-256.

    Raises:
        OverlayError: as for :func:`edit`; or the release is the pinned one; or git could
            not begin.
    """
    if version == overlay.pin.release:
        raise OverlayError(
            Exit.USAGE,
            "is the release that the overlay is for",
            subject=f"vLLM {version}",
            next_step="run `make edit` to lay the series out, or name another release",
        )
    edit(overlay, upstream, dry_run=False)
    folder = overlay.root / EDIT
    git.text(folder, "checkout", "--quiet", "--detach", PRISTINE)
    for path in set(upstream.paths) - set(release.paths):
        (folder / path).unlink()
    for path in release.paths:
        tree.write_file(folder / path, release.read(path))
    tree.commit(folder, f"vLLM {version}, pristine\n")
    onto = git.text(folder, "rev-parse", "HEAD")
    git.text(folder, "checkout", "--quiet", "series")
    old = git.text(folder, "rev-parse", PRISTINE)
    git.text(folder, "tag", "--force", PRISTINE, onto)
    tree.note_release(folder, (version, archives))
    _lend_identity(folder)
    # The options with which `git merge-file` agrees.
    # Git follows a file that the release has elsewhere.
    options = ["--quiet", "--empty=drop", "-Xdiff-algorithm=myers"]
    stopped = folder / ".git" / "rebase-merge"
    git.call(
        folder,
        [*tree.IDENTITY, "rebase", *options, "--onto", onto, old, "series"],
        succeeded=lambda code: code == 0 or stopped.exists(),
    )
    return git.text(folder, "diff", "--name-only", "--diff-filter=U").splitlines()


def _lend_identity(folder: Path) -> None:
    """Configure a name for the author's commits in the tree if they have none of their own."""
    command = ["git", "config", "--get", "user.email"]
    # Not by `series.git`, which hides the author's own configuration from git.
    if subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode:
        git.text(folder, "config", "user.name", "overlay")
        git.text(folder, "config", "user.email", "overlay@localhost")
