"""The git tree in build/edit: upstream's modules, and a commit for each patch.

The branch is ``series``. The tag ``pristine`` is the release that the series begins at, and
the tag ``saved`` is the commit at which the tree and ``patches/`` agreed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from overlay import pin as pins
from overlay.patches import header_fields
from overlay.pin import sha256

from series import errata, git
from series.upstream import Upstream

EDIT = "build/edit"
PRISTINE, SAVED = "pristine", "saved"
#: git settings that hold: the digest of patches/ when the tree was laid out; and, as JSON, the
#: version and archives of the release that the tree is for, if it is not the pinned release.
_PATCHES, _RELEASE = "overlay.patches", "overlay.rebased-to"
#: git's own setting for the file that a message begins with, and that file below ``.git``.
_TEMPLATE, _HEADER = "commit.template", "patch-header"
#: For the author's own git commands in the tree: git's comments stay out of the header, a
#: conflict shows the old release's text, and no attributes change how files merge.
_CONFIG = {
    "commit.cleanup": "strip",
    "core.commentChar": ";",
    "merge.conflictStyle": "diff3",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
}
IDENTITY = ("-c", "user.name=overlay", "-c", "user.email=overlay@localhost")


def lay_out(
    tree: Path,
    title: str,
    upstream: Upstream,
    commits: Iterable[tuple[str, Mapping[str, bytes]]],
) -> None:
    """Make a git tree of upstream's modules, and a branch with a commit for each patch.

    An existing tree in that directory is replaced. ``title`` is the message of the first commit.
    ``commits`` has each patch's header, and the files that it changes, afterwards.
    """
    tree.mkdir(parents=True, exist_ok=True)
    if not (tree / ".git").exists():
        git.text(tree, "init", "--quiet")
    for key, value in _CONFIG.items():
        git.text(tree, "config", key, value)
    # Until the tree is whole again, `make refresh` must find nothing to refresh from.
    if is_laid_out(tree):
        git.text(tree, "tag", "--delete", SAVED)
        git.text(tree, "config", "--unset-all", _PATCHES)
    note_release(tree, None)
    git.text(tree, "config", _TEMPLATE, os.devnull)
    # A branch without a past, whatever branch was left here before.
    git.text(tree, "update-ref", "-d", "refs/heads/laying-out")
    git.text(tree, "symbolic-ref", "HEAD", "refs/heads/laying-out")
    for path in upstream.paths:
        write_file(tree / path, upstream.read(path))
    commit(tree, f"{title}\n")
    git.text(tree, "tag", "--force", PRISTINE)
    for header, changed in commits:
        for path, data in changed.items():
            write_file(tree / path, data)
        commit(tree, message_of(header))
    git.text(tree, "branch", "--force", "--move", "series")


def begin_message(tree: Path, header: str) -> None:
    """Let the message of the author's commits begin with a header, until the next layout."""
    notes = (
        "; Lines that begin with ';' are left out. Each field needs a text. An issue: a link, or\n"
    )
    notes += "; none; Forwarded: a link, no or not-needed. Serves: features and fixes, or all.\n"
    file = tree.resolve() / ".git" / _HEADER
    write_file(file, (header + notes).encode())
    git.text(tree, "config", _TEMPLATE, str(file))


def message_of(header: str) -> str:
    """The message of a patch's commit: the Description's first line, and the header.

    Git's subject is all lines up to an empty one, which would be the whole header.
    """
    header = header.rstrip("\n")
    subject = header_fields(header).get("Description", "").partition("\n")[0]
    return f"{subject}\n\n{header}\n" if subject else f"{header}\n"


def header_of(message: str) -> str:
    """The header in a commit's message, without the subject that :func:`message_of` adds."""
    subject, _, header = message.strip("\n").partition("\n\n")
    description = header_fields(header).get("Description", "")
    if subject == description.partition("\n")[0] and description:
        return header.lstrip("\n")
    return message.strip("\n")


def commit(tree: Path, message: str) -> None:
    """Commit everything in the tree, with the message as it stands."""
    git.text(tree, "add", "--all", "--force")
    options = ["--quiet", "--no-verify", "--no-gpg-sign", "--cleanup=verbatim", "--allow-empty"]
    git.text(tree, *IDENTITY, "commit", *options, "--file=-", input=message)


def is_laid_out(tree: Path) -> bool:
    """Return whether the tree was laid out completely."""
    return bool(git.text(tree, "tag", "--list", SAVED))


def note_saved(tree: Path, root: Path) -> None:
    """Note that the tree and ``patches/`` agree."""
    git.text(tree, "tag", "--force", SAVED)
    git.text(tree, "config", _PATCHES, _digest_of_patches(root))


def patches_unchanged(tree: Path, root: Path) -> bool:
    """Return whether ``patches/`` is as it was when the tree was laid out or saved."""
    return _setting(tree, _PATCHES) == _digest_of_patches(root)


def holds_work(tree: Path) -> bool:
    """Return whether the tree has changes or commits that ``patches/`` lacks."""
    if git.text(tree, "status", "--porcelain"):
        return True
    if not is_laid_out(tree):
        return False
    heads = git.text(tree, "rev-parse", "HEAD", "series", f"{SAVED}^{{commit}}").split()
    return len(set(heads)) > 1


def note_release(tree: Path, release: tuple[str, Mapping[str, str]] | None) -> None:
    """Note the version and archives of the release that the tree is for; None: the pinned one."""
    git.text(tree, "config", _RELEASE, json.dumps(release))


def pin_of_release(tree: Path, pin: pins.Pin) -> pins.Pin:
    """The pin of the release that the tree is for, as far as known; ``pin`` is the present one."""
    release = json.loads(_setting(tree, _RELEASE) or "null")
    if not release:
        return pin
    version, archives = release
    if version == pin.release:  # Refreshed before; there may be more archives now.
        return replace(pin, archives={**archives, **pin.archives})
    return pins.Pin(version, pin.overlay, archives, {}, {})


def write_file(file: Path, data: bytes) -> None:
    """Write a file, and make the directories that it is in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _setting(tree: Path, key: str) -> str:
    return git.text(tree, "config", "--default", "", "--get", key)


def generated(root: Path) -> list[Path]:
    """The files in patches/ that refresh writes: all but the facts about upstream."""
    return sorted(file for file in (root / "patches").iterdir() if file.name != errata.NAME)


def _digest_of_patches(root: Path) -> str:
    files = generated(root)
    return sha256("".join(f"{sha256(f.read_bytes())}  {f.name}\n" for f in files).encode())
