"""Turn the commits of the edit tree into patch files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from overlay.errors import Exit, OverlayError
from overlay.patches import SERIES, Series, header_fields, parse, split_lines
from overlay.pin import PACKAGE

from series import catalogue, git
from series.check import FIELDS, missing_fields
from series.extents import enclosing
from series.tree import PRISTINE, header_of

_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_CONFLICT = re.compile(rb"^\+(?:<{7}|\|{7}|>{7}) .*$", re.MULTILINE)
#: The longest name of a patch, without its number, in characters.
LONGEST_SLUG = 60
DIFF = (
    *("-U0", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--text"),
    *("--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/"),
)


def series_of(tree: Path) -> tuple[dict[str, bytes], Series]:
    """The files of ``patches/`` that a tree's commits make, by path, and the series in them.

    Raises:
        OverlayError: a commit cannot be a patch.
    """
    files: dict[str, bytes] = {}
    patches = []
    commits = git.text(tree, "rev-list", "--reverse", f"{PRISTINE}..HEAD").split()
    for number, commit in enumerate(commits, 1):
        name, data = _patch(tree, number, commit)
        patches.append(parse(name, data))
        files[f"patches/{name}"] = data
    files[f"patches/{SERIES}"] = "".join(f"{patch.name}\n" for patch in patches).encode()
    series = Series(patches)
    files[f"patches/{catalogue.NAME}"] = catalogue.page(series)
    return files, series


def _patch(tree: Path, number: int, commit: str) -> tuple[str, bytes]:
    """The name and bytes of the patch that a commit makes."""
    message = header_of(git.text(tree, "log", "-1", "--format=%B", commit))
    lines = message.splitlines()

    def refused(reason: str, next_step: str) -> OverlayError:
        subject = f"commit {commit[:12]} ({lines[0] if lines else ''})"
        return OverlayError(Exit.USAGE, reason, subject=subject, next_step=next_step)

    if missing := missing_fields(message):
        header = "write it as a DEP-3 header: " + ", ".join(FIELDS)
        raise refused(f"the message lacks {', '.join(missing)}", header)
    subject, _, rest = message.partition("\n\n")
    if not header_fields(subject).keys() & set(FIELDS) and "\n" not in subject and rest:
        step = "make them the same with `git commit --amend`, or a rebase"
        raise refused("the subject is not the first line of the Description", step)
    if comment := next((line for line in lines if line[:1] in ("#", ";")), None):
        step = "take it out with `git commit --amend`, or a rebase"
        raise refused(f"the message holds a comment: {comment}", step)
    if any(line.startswith("--- ") for line in lines):
        step = "reword the message with `git commit --amend`, or a rebase"
        raise refused("a line of the message begins with '--- '", step)
    changed = git.text(tree, "diff", "--name-status", "--no-renames", f"{commit}^", commit)
    for line in changed.splitlines():
        status, path = line.split("\t")
        if status != "M":
            step = f"put a new module into vendor_overlay/{PACKAGE}/"
            raise refused(f"adds or removes {path}; a patch may only change a file", step)
    diff = git.data(tree, "diff", *DIFF, f"{commit}^", commit)
    changes = b"".join(bare(diff, lambda path: git.data(tree, "show", f"{commit}:{path}")))
    if mark := _CONFLICT.search(changes):
        step = "settle the conflict in that commit, and run `make refresh` again"
        raise refused(f"adds git's mark of a conflict: {mark[0][1:].decode()}", step)
    return (
        f"{number:04}-{slug(header_fields(message)['Description'])}.patch",
        f"{message}\n\n".encode() + changes,
    )


def slug(description: str) -> str:
    """The first line of a patch's description as a file name, cut between words."""
    words = re.findall("[a-z0-9]+", description.partition("\n")[0].lower())
    while len("-".join(words)) > LONGEST_SLUG and len(words) > 1:
        words.pop()
    return "-".join(words)[:LONGEST_SLUG]


def bare(diff: bytes, read: Callable[[str], bytes]) -> Iterator[bytes]:
    """Yield the lines of a git diff without git's headers; each ``@@`` names its place.

    The diff has no context lines. ``read`` returns the bytes of a path after the change.
    """
    remaining = 0
    after = b""
    for line in split_lines(diff):
        if remaining and line[:1] in b"+-":
            remaining -= 1
            yield line
        elif hunk := _HUNK.match(line):
            remaining = sum(1 if count is None else int(count) for count in hunk.group(1, 3))
            name = enclosing(after, int(hunk[2])).rpartition(".")[2]
            yield f"{hunk[0].decode()} {name}".rstrip().encode() + b"\n"
        elif line.startswith((b"--- ", b"+++ ", b"\\ ")):
            if line.startswith(b"+++ b/"):
                after = read(line[6:].rstrip(b"\n").decode())
            yield line
