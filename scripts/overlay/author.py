"""The author's side: vendor, edit, refresh, dist, and the checks behind `make test`.

Standard library and git. Upstream's files come from an installation or a pinned
wheel; nothing of theirs is written outside ``build/`` and the ignored parts of
``vendor_overlay/``.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from overlay import pin as pins
from overlay.errors import Exit, OverlayError, damaged
from overlay.installation import Installation
from overlay.patches import SERIES, Series, header_fields, parse, split_lines
from overlay.pin import PACKAGE, sha256
from overlay.source import PROVENANCE, Overlay
from overlay.state import inspect, refuse_foreign

#: The DEP-3 fields of a patch: why and how, whose problem it answers, and when it can go.
FIELDS = ("Description", "How", "Bug", "Author", "Forwarded", "Last-Update", "Drop-When")

_EDIT = "build/edit"
_PRISTINE, _SAVED, _LAID_OUT = "pristine", "saved", "overlay.patches"
#: The release that the tree is for, if it is not the pinned one, and its wheels.
_RELEASE, _ARCHIVE = "overlay.release", "overlay.archive"
#: For the author's own git in the tree: what git says in a message is not for the header, a
#: conflict shows the old release's text, and nobody's attributes change how files merge.
_CONFIG = {
    "commit.cleanup": "strip",
    "core.commentChar": ";",
    "merge.conflictStyle": "diff3",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
}
_IDENTITY = ("-c", "user.name=overlay", "-c", "user.email=overlay@localhost")
_CONFLICT = re.compile(rb"^\+(?:<{7}|\|{7}|>{7}) .*$", re.MULTILINE)
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)

_LONGEST_SLUG = 60
#: What an archive for container builds does without.
_NOT_SHIPPED = ("tests/", ".ci/", ".git", "pyproject.toml")


@dataclass(frozen=True)
class Upstream:
    """Upstream's Python files, proven as far as the pin reaches.

    Attributes:
        paths: every module of the vllm package.
        read: gives the bytes of one of them.
    """

    paths: tuple[str, ...]
    read: Callable[[str], bytes]


def from_installation(installation: Installation, overlay: Overlay) -> Upstream:
    """Upstream's files from an installation, pristine or overlaid.

    Raises:
        OverlayError: a pinned file there is foreign.
    """
    found = inspect(installation, overlay)
    refuse_foreign(found)
    site = installation.site

    def read(path: str) -> bytes:
        return found.pristine(path) if path in overlay.pin.upstream else (site / path).read_bytes()

    files = (path.relative_to(site).as_posix() for path in (site / "vllm").rglob("*.py"))
    return Upstream(tuple(sorted(f for f in files if not f.startswith(PACKAGE + "/"))), read)


def from_wheel(wheel: Path, overlay: Overlay) -> Upstream:
    """Upstream's files from a wheel whose checksum is pinned.

    Raises:
        OverlayError: it is another wheel.
    """
    digest = digest_of(wheel)
    if digest not in overlay.pin.archives.values():
        raise OverlayError(
            Exit.RELEASE,
            "is not one of the pinned archives",
            subject=wheel,
            expected="one that VERSION_PIN lists under [archives]",
            found=f"SHA-256 {digest}",
            next_step=f"download the wheel of vLLM {overlay.pin.release}",
        )
    if not zipfile.is_zipfile(wheel):
        raise OverlayError(
            Exit.USAGE,
            "is a pinned archive, but no wheel",
            subject=wheel,
            next_step="name a wheel of the release",
        )
    archive = zipfile.ZipFile(wheel)
    names = (n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py"))
    return Upstream(tuple(sorted(names)), archive.read)


def digest_of(wheel: Path) -> str:
    """The SHA-256 of a wheel file, in lower-case hexadecimal.

    Raises:
        OverlayError: it cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with wheel.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise OverlayError(
            Exit.USAGE,
            f"cannot be read ({error.strerror})",
            subject=wheel,
            next_step="name a wheel file",
        ) from None
    return digest.hexdigest()


def load_unproven(root: Path) -> Overlay:
    """The overlay in ``root``, though its patches may be ahead of its checksums."""
    data = (root / pins.NAME).read_bytes()
    return Overlay(root, pins.loads(data.decode()), data, Series.load(root / "patches"))


def overlay_version(root: Path) -> str:
    """The overlay's version, as the readiness package states it."""
    origin = root / "vendor_overlay" / PACKAGE / "version.py"
    match = _VERSION.search(origin.read_text())
    if not match:
        raise damaged('does not say __version__ = "…"', origin)
    return match[1]


def expected_pin(
    root: Path, pin: pins.Pin, series: Series, upstream: Callable[[str], bytes] | None
) -> pins.Pin:
    """The pin that the checkout in ``root`` ought to have.

    Args:
        root: the checkout; our modules and the patch files are read from it.
        pin: the present pin; the release and its archives are carried over.
        series: the patches.
        upstream: gives upstream's bytes of a path, or None to carry over the
            checksums of the patched files as well.
    """
    if upstream is None:
        before = dict(pin.upstream)
        after = {path: pin.result[path] for path in before}
    else:
        originals = {path: upstream(path) for path in sorted(series.paths())}
        before = {path: sha256(data) for path, data in originals.items()}
        after = {path: sha256(series.apply(path, data)) for path, data in originals.items()}
    tree = root / "vendor_overlay"
    for file in sorted((tree / PACKAGE).rglob("*")):
        name = file.relative_to(tree).as_posix()
        if not file.is_file() or "__pycache__" in file.parts or file.name[0] == "." or "~" in name:
            continue  # An editor's own files are not part of the overlay.
        if not pins.is_safe(name) or " " in name:
            raise damaged("has a name that VERSION_PIN cannot hold; rename it", file)
        after[name] = sha256(file.read_bytes())
    for name in (SERIES, *(patch.name for patch in series.patches)):
        data = (root / "patches" / name).read_bytes()
        after[f"{PROVENANCE}/patches/{name}"] = sha256(data)
    return pins.Pin(pin.release, overlay_version(root), pin.archives, before, after)


def complaints(root: Path, upstream: Callable[[str], bytes]) -> Iterator[str]:
    """What is wrong with the checkout in ``root``, one sentence each.

    Args:
        root: the checkout.
        upstream: gives upstream's bytes of a path.
    """
    try:
        overlay = load_unproven(root)
        for name in _unlisted(root, overlay.series):
            yield f"patches/{name} is not listed in patches/series"
        for patch in overlay.series.patches:
            for name in missing_fields(patch.header):
                yield f"patches/{patch.name}: the header lacks {name}"
        pin = expected_pin(root, overlay.pin, overlay.series, upstream)
    except OverlayError as error:
        yield str(error)
        return
    if pin.dumps().encode() != overlay.pin_bytes:
        yield "VERSION_PIN is stale: run `make refresh`"


def missing_fields(header: str) -> list[str]:
    """The required DEP-3 fields that ``header`` lacks or leaves empty."""
    fields = header_fields(header)
    return [name for name in FIELDS if not fields.get(name)]


def vendor(overlay: Overlay, upstream: Upstream, dry_run: bool) -> list[str]:
    """Build the vendored copies into ``vendor_overlay/``, where git ignores them.

    Returns:
        What was written, relative to the checkout.
    """
    written = []
    for path in overlay.targets:
        data = overlay.overlaid_bytes(path, upstream.read(path))
        file = overlay.root / "vendor_overlay" / path
        if not file.is_file() or file.read_bytes() != data:
            written.append(f"vendor_overlay/{path}")
            if not dry_run:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
    return written


def edit(overlay: Overlay, upstream: Upstream, dry_run: bool) -> list[str]:
    """Lay out upstream's modules in a git tree, with a commit for each patch.

    Returns:
        The tree, relative to the checkout.

    Raises:
        OverlayError: the tree holds work that `make refresh` has not written out,
            or a patch does not apply.
    """
    tree = overlay.root / _EDIT
    if tree.exists() and _holds_work(tree):
        raise OverlayError(
            Exit.BUSY,
            "holds changes that are not in patches/",
            subject=tree,
            next_step="commit them there and run `make refresh`, or delete the directory",
        )
    if unlisted := _unlisted(overlay.root, overlay.series):
        raise OverlayError(
            Exit.BUSY,
            "is not listed in patches/series, and refresh would remove it",
            subject=overlay.root / "patches" / unlisted[0],
            next_step="list it, or put it somewhere else, and run `make edit` again",
        )
    texts = {path: upstream.read(path) for path in sorted(overlay.series.paths())}
    commits: list[tuple[str, dict[str, bytes]]] = []
    for patch in overlay.series.patches:
        changed = {f.path: f.apply(texts[f.path], patch.name) for f in patch.files}
        texts |= changed
        commits.append((patch.header, changed))
    if dry_run:
        return [_EDIT]
    _lay_out(tree, f"vLLM {overlay.pin.release}, pristine", upstream, commits)
    _saved(tree, overlay.root)
    return [_EDIT]


def _lay_out(
    tree: Path,
    title: str,
    upstream: Upstream,
    commits: Iterable[tuple[str, Mapping[str, bytes]]],
) -> None:
    """Make a git tree of upstream's modules, and a branch with a commit for each patch."""
    tree.mkdir(parents=True, exist_ok=True)
    if not (tree / ".git").exists():
        _git(tree, "init", "--quiet")
    for key, value in _CONFIG.items():
        _git(tree, "config", key, value)
    # From here on the tree says nothing that could be refreshed from, until it is whole.
    if _git(tree, "tag", "--list", _SAVED):
        _git(tree, "tag", "--delete", _SAVED)
        _git(tree, "config", "--unset-all", _LAID_OUT)
    _target(tree, None)
    # A branch without a past, whatever branch was left here before.
    _git(tree, "update-ref", "-d", "refs/heads/laying-out")
    _git(tree, "symbolic-ref", "HEAD", "refs/heads/laying-out")
    for path in upstream.paths:
        write_file(tree / path, upstream.read(path))
    _commit(tree, f"{title}\n")
    _git(tree, "tag", "--force", _PRISTINE)
    for header, changed in commits:
        for path, data in changed.items():
            write_file(tree / path, data)
        _commit(tree, header.rstrip("\n") + "\n")
    _git(tree, "branch", "--force", "--move", "series")


def rebase(
    overlay: Overlay,
    upstream: Upstream,
    release: Upstream,
    version: str,
    archives: Mapping[str, str],
) -> list[str]:
    """Lay out the series as :func:`edit` does, and rebase it onto another release with git.

    What merges is committed, and what the release holds already is dropped. Where a patch
    conflicts git stops, as in any rebase: it is for the author to settle. `make refresh`
    afterwards writes patches/ and VERSION_PIN for that release.

    Args:
        overlay: the overlay.
        upstream: the files of the pinned release.
        release: those of the other one.
        version: of that release.
        archives: its wheels, by file name, with their SHA-256.

    Returns:
        The files that conflict in the patch at which git has stopped.

    Raises:
        OverlayError: as for :func:`edit`; or it is the pinned release; or git could not begin.
    """
    if version == overlay.pin.release:
        raise OverlayError(
            Exit.USAGE,
            "is the release that the overlay is for",
            subject=f"vLLM {version}",
            next_step="run `make edit` to lay the series out, or name another release",
        )
    edit(overlay, upstream, dry_run=False)
    tree = overlay.root / _EDIT
    _git(tree, "checkout", "--quiet", "--detach", _PRISTINE)
    for path in set(upstream.paths) - set(release.paths):
        (tree / path).unlink()
    for path in release.paths:
        write_file(tree / path, release.read(path))
    _commit(tree, f"vLLM {version}, pristine\n")
    onto = _git(tree, "rev-parse", "HEAD")
    _git(tree, "checkout", "--quiet", "series")
    old = _git(tree, "rev-parse", _PRISTINE)
    _git(tree, "tag", "--force", _PRISTINE, onto)
    _target(tree, (version, archives))
    if _lacks_identity(tree):
        _git(tree, "config", "user.name", "overlay")
        _git(tree, "config", "user.email", "overlay@localhost")
    # As `git merge-file` does it.
    options = ["--quiet", "--empty=drop", "-Xdiff-algorithm=myers", "-Xno-renames"]
    _git_bytes(tree, *_IDENTITY, "rebase", *options, "--onto", onto, old, "series", stops=True)
    return _git(tree, "diff", "--name-only", "--diff-filter=U").splitlines()


def _target(tree: Path, release: tuple[str, Mapping[str, str]] | None) -> None:
    """Note the release that the tree is for, if it is not the pinned one."""
    for key in (_RELEASE, _ARCHIVE):
        if _git(tree, "config", "--default", "", "--get", key):
            _git(tree, "config", "--unset-all", key)
    if release:
        _git(tree, "config", _RELEASE, release[0])
        for name, digest in sorted(release[1].items()):
            _git(tree, "config", "--add", _ARCHIVE, f"{digest}  {name}")


def _targeted(tree: Path, pin: pins.Pin) -> pins.Pin:
    """The pin of the release that the tree is for, as far as it is known."""
    version = _git(tree, "config", "--default", "", "--get", _RELEASE)
    if not version:
        return pin
    rows = _git(tree, "config", "--get-all", _ARCHIVE).splitlines()
    archives = {name: digest for digest, name in (row.split("  ", 1) for row in rows)}
    if version == pin.release:  # Refreshed before; there may be more archives now.
        return replace(pin, archives={**archives, **pin.archives})
    return pins.Pin(version, pin.overlay, archives, {}, {})


def _lacks_identity(tree: Path) -> bool:
    """Whether a commit of the person's own would fail for want of a name."""
    command = ["git", "config", "--get", "user.email"]
    return subprocess.run(command, cwd=tree, capture_output=True, check=False).returncode != 0


def refresh(root: Path, dry_run: bool) -> list[str]:
    """Write patches/ and VERSION_PIN from ``build/edit``, and nothing else.

    Without that tree the patches stay, and VERSION_PIN follows our own modules.

    Returns:
        What was written or removed, relative to the checkout.

    Raises:
        OverlayError: the tree has uncommitted changes, a commit without the DEP-3
            fields, or one that does more than change upstream's modules.
    """
    tree = root / _EDIT
    pin = pins.loads((root / pins.NAME).read_text())
    if not tree.exists():
        series = Series.load(root / "patches")
        expected = expected_pin(root, pin, series, None)
        if series_digests(expected) != series_digests(pin):
            raise OverlayError(
                Exit.USAGE,
                "differs from what VERSION_PIN expects, and only build/edit can tell the result",
                subject=root / "patches",
                next_step="run `make edit`, and then `make refresh`",
            )
        return _save(root, {}, expected, dry_run)
    branch = _git(tree, "rev-parse", "--symbolic-full-name", "HEAD")
    if branch != "refs/heads/series" or not _git(tree, "tag", "--list", _SAVED):
        raise OverlayError(
            Exit.BUSY,
            "is not on its branch `series`: a rebase is under way, or `make edit` was cut off",
            subject=tree,
            next_step="finish it (`git rebase --continue`, `git checkout series`), or delete the "
            "directory, run `make edit` again, and then `make refresh`",
        )
    if dirty := _git(tree, "status", "--porcelain"):
        raise OverlayError(
            Exit.USAGE,
            f"has uncommitted changes: {dirty.splitlines()[0][3:]}",
            subject=tree,
            next_step="commit them (`git commit --amend`, or --fixup and `git rebase "
            f"--interactive --autosquash {_PRISTINE}`) and run `make refresh` again",
        )
    if _git(tree, "config", "--default", "", "--get", _LAID_OUT) != _digest_of_patches(root):
        raise OverlayError(
            Exit.BUSY,
            "has changed since `make edit`; refresh would overwrite that",
            subject=root / "patches",
            next_step="put your commits aside (`git format-patch saved` in build/edit), delete "
            "build/edit, run `make edit` and take them up again",
        )
    if _git(tree, "merge-base", _PRISTINE, "HEAD") != _git(tree, "rev-parse", _PRISTINE):
        raise OverlayError(
            Exit.BUSY,
            "does not stand on its release: a rebase was given up",
            subject=tree,
            next_step="delete the directory and run `make edit` or `make rebase` again",
        )
    pin = _targeted(tree, pin)
    files, series = _series(tree)

    def upstream(path: str) -> bytes:
        return _git_bytes(tree, "show", f"{_PRISTINE}:{path}")

    for path in sorted(series.paths()):
        if pin.upstream.get(path, sha256(upstream(path))) != sha256(upstream(path)):
            raise damaged("the tree's pristine file is not the pinned one; lay it out anew", path)
        if series.apply(path, upstream(path)) != _git_bytes(tree, "show", f"HEAD:{path}"):
            raise damaged("the patches do not give what the tree holds", path)
    written = _save(root, files, _aside(root, files, pin, series, upstream), dry_run)
    if not dry_run:
        _saved(tree, root)
    return written


def _series(tree: Path) -> tuple[dict[str, bytes], Series]:
    """The files of ``patches/`` that a tree's commits make, and what they say."""
    files: dict[str, bytes] = {}
    patches = []
    for number, commit in enumerate(_commits(tree, _PRISTINE), 1):
        name, data = _patch(tree, number, commit)
        patches.append(parse(name, data))
        files[f"patches/{name}"] = data
    files[f"patches/{SERIES}"] = "".join(f"{patch.name}\n" for patch in patches).encode()
    return files, Series(patches)


def _aside(
    root: Path,
    files: Mapping[str, bytes],
    pin: pins.Pin,
    series: Series,
    upstream: Callable[[str], bytes],
) -> pins.Pin:
    """The pin for patch files that are not written yet: they are written once aside."""
    with tempfile.TemporaryDirectory() as scratch:
        aside = Path(scratch)
        for name, data in files.items():
            write_file(aside / name, data)
        (aside / "vendor_overlay").symlink_to((root / "vendor_overlay").resolve())
        return expected_pin(aside, pin, series, upstream)


def candidate(
    overlay: Overlay,
    release: Upstream,
    version: str,
    archives: Mapping[str, str],
    commits: Iterable[tuple[str, Mapping[str, bytes]]],
) -> tuple[dict[str, bytes], pins.Pin]:
    """The series and the pin for another release, from files before and after each patch.

    Args:
        overlay: the overlay; its modules are the candidate's, too.
        release: the release's files.
        version: of that release.
        archives: its wheels, by file name, with their SHA-256.
        commits: each patch's header, and the files that it changes, afterwards.

    Returns:
        The files of ``patches/``, and the pin, as `make refresh` would write them.

    Raises:
        OverlayError: git is not there, or a commit is no patch.
    """
    commits = list(commits)
    paths = {path for _, changed in commits for path in changed}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        _lay_out(tree, version, Upstream(tuple(sorted(paths)), release.read), commits)
        files, series = _series(tree)
    pin = pins.Pin(version, overlay.pin.overlay, archives, {}, {})
    return files, _aside(overlay.root, files, pin, series, release.read)


def dist(root: Path, upstream: Callable[[Overlay], Upstream], dry_run: bool) -> list[str]:
    """Build ``build/dist/vllm-readiness-overlay-VERSION.tar`` from the commit HEAD.

    The archive is not compressed, because compressors differ between Python
    versions and the same commit is to give the same bytes everywhere.

    Args:
        root: the checkout.
        upstream: gives upstream's files, proven by the overlay of HEAD.
        dry_run: check, and write nothing.

    Returns:
        The archive, relative to the checkout.

    Raises:
        OverlayError: there is no git checkout, or its overlay contradicts itself.
    """
    if not (root / ".git").exists():
        raise OverlayError(
            Exit.USAGE,
            "is not a git checkout; an archive is made from a commit",
            subject=root,
            next_step="run it in a clone of the overlay's repository",
        )
    time = int(_git(root, "log", "-1", "--no-show-signature", "--format=%ct"))
    with tempfile.TemporaryDirectory() as scratch:
        head = Path(scratch)
        executable = set()
        for path, mode, blob in _committed(root):
            write_file(head / path, blob)
            if mode == "100755":
                executable.add(path)
        overlay = Overlay.load(head)
        vendor(overlay, upstream(overlay), dry_run=False)
        for path in overlay.added:
            overlay.added_bytes(path)
        name = f"vllm-readiness-overlay-{overlay.pin.overlay}"
        files = (f.relative_to(head).as_posix() for f in head.rglob("*") if f.is_file())
        shipped = sorted(f for f in files if not f.startswith(_NOT_SHIPPED))
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in shipped:
                info = tarfile.TarInfo(f"{name}/{path}")
                info.size = (head / path).stat().st_size
                info.mtime = time
                info.mode = 0o755 if path in executable else 0o644
                archive.addfile(info, io.BytesIO((head / path).read_bytes()))
    target = f"build/dist/{name}.tar"
    if not dry_run:
        write_file(root / target, data.getvalue())
    return [target]


def _committed(root: Path) -> Iterator[tuple[str, str, bytes]]:
    """The files of HEAD: path, mode and bytes, as they were committed.

    Blobs, and not `git archive`: attributes and settings of a clone change what that writes.
    """
    entries = _git(root, "ls-tree", "-r", "-z", "--full-tree", "HEAD").rstrip("\0").split("\0")
    listed = [(*entry.partition("\t")[0].split(), entry.partition("\t")[2]) for entry in entries]
    if odd := [path for mode, _, _, path in listed if mode not in ("100644", "100755")]:
        raise damaged("is a link or a submodule; an archive holds plain files", odd[0])
    names = "".join(f"{blob}\n" for _, _, blob, _ in listed).encode()
    batch = io.BytesIO(_git_bytes(root, "cat-file", "--batch", input=names))
    for mode, _, _, path in listed:
        size = int(batch.readline().split()[2])
        yield path, mode, batch.read(size)
        batch.readline()


def _patch(tree: Path, number: int, commit: str) -> tuple[str, bytes]:
    """A commit as a patch: its name, and its bytes."""
    message = _git(tree, "log", "-1", "--format=%B", commit).strip("\n")
    subject = message.partition("\n")[0]
    if missing := missing_fields(message):
        raise OverlayError(
            Exit.USAGE,
            f"the message lacks {', '.join(missing)}",
            subject=f"commit {commit[:12]} ({subject})",
            next_step="write it as a DEP-3 header: " + ", ".join(FIELDS),
        )
    if comment := next((each for each in message.splitlines() if each[:1] in ("#", ";")), None):
        raise OverlayError(
            Exit.USAGE,
            f"the message holds a comment: {comment}",
            subject=f"commit {commit[:12]} ({subject})",
            next_step="take it out with `git commit --amend`, or a rebase",
        )
    if any(line.startswith("--- ") for line in message.splitlines()):
        raise damaged("a line of the message begins with '--- '", f"commit {commit[:12]}")
    for line in _git(
        tree, "diff", "--name-status", "--no-renames", f"{commit}^", commit
    ).splitlines():
        status, path = line.split("\t")
        if status != "M":
            raise OverlayError(
                Exit.USAGE,
                "is added or removed; a patch may only change a file",
                subject=f"{path} in commit {commit[:12]}",
                next_step=f"put a new module into vendor_overlay/{PACKAGE}/",
            )
    options = ["-U0", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", "--text"]
    options += ["--diff-algorithm=myers", "--src-prefix=a/", "--dst-prefix=b/"]
    changes = b"".join(bare(_git_bytes(tree, "diff", *options, f"{commit}^", commit)))
    if mark := _CONFLICT.search(changes):
        raise OverlayError(
            Exit.USAGE,
            f"puts in git's mark of a conflict: {mark[0][1:].decode()}",
            subject=f"commit {commit[:12]} ({subject})",
            next_step="settle the conflict in that commit, and run `make refresh` again",
        )
    return f"{number:04}-{_slug(message)}.patch", f"{message}\n\n".encode() + changes


def _slug(message: str) -> str:
    """The first line of a patch's description as a file name, cut between words."""
    words = re.findall("[a-z0-9]+", header_fields(message)["Description"].split("\n")[0].lower())
    while len("-".join(words)) > _LONGEST_SLUG and len(words) > 1:
        words.pop()
    return "-".join(words)


def bare(diff: bytes) -> Iterator[bytes]:
    """A diff of git's without its own headers, and without upstream's line behind the @@."""
    within = 0
    for line in split_lines(diff):
        if within and line[:1] in b"+-":
            within -= 1
            yield line
        elif hunk := re.match(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            within = sum(1 if count is None else int(count) for count in hunk.groups())
            yield hunk[0] + b"\n"
        elif line.startswith((b"--- ", b"+++ ", b"\\ ")):
            yield line


def _save(root: Path, files: dict[str, bytes], pin: pins.Pin, dry_run: bool) -> list[str]:
    files[pins.NAME] = pin.dumps().encode()
    present = {f"patches/{file.name}" for file in (root / "patches").iterdir()}
    gone = sorted(present - set(files)) if f"patches/{SERIES}" in files else []
    changed = [
        name
        for name, data in sorted(files.items())
        if not (root / name).is_file() or (root / name).read_bytes() != data
    ]
    if not dry_run:
        for name in changed:
            write_file(root / name, files[name])
        for name in gone:
            (root / name).unlink()
    return changed + [f"{name} (removed)" for name in gone]


def series_digests(pin: pins.Pin) -> dict[str, str]:
    """The checksums of the patch files, by path in an installation."""
    return {p: d for p, d in pin.result.items() if p.startswith(f"{PROVENANCE}/patches/")}


def _digest_of_patches(root: Path) -> str:
    files = sorted((root / "patches").iterdir())
    return sha256("".join(f"{sha256(f.read_bytes())}  {f.name}\n" for f in files).encode())


def _saved(tree: Path, root: Path) -> None:
    """Note that the tree and ``patches/`` say the same."""
    _git(tree, "tag", "--force", _SAVED)
    _git(tree, "config", _LAID_OUT, _digest_of_patches(root))


def _holds_work(tree: Path) -> bool:
    """Whether the tree says something that ``patches/`` does not."""
    if _git(tree, "status", "--porcelain"):
        return True
    if not _git(tree, "tag", "--list", _SAVED):
        return False  # Laying it out was cut off.
    heads = _git(tree, "rev-parse", "HEAD", "series", f"{_SAVED}^{{commit}}").split()
    return len(set(heads)) > 1


def _unlisted(root: Path, series: Series) -> list[str]:
    """Files in ``patches/`` that no series names."""
    listed = {patch.name for patch in series.patches} | {SERIES}
    return sorted({file.name for file in (root / "patches").iterdir()} - listed)


def write_file(file: Path, data: bytes) -> None:
    """Write a file, and make the directories that it is in."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def _commits(tree: Path, since: str) -> list[str]:
    return _git(tree, "rev-list", "--reverse", f"{since}..HEAD").split()


def _commit(tree: Path, message: str) -> None:
    _git(tree, "add", "--all", "--force")
    options = ["--quiet", "--no-verify", "--no-gpg-sign", "--cleanup=verbatim", "--allow-empty"]
    _git(tree, *_IDENTITY, "commit", *options, "--file=-", input=message)


def _git(tree: Path, *arguments: str, input: str = "") -> str:
    return _git_bytes(tree, *arguments, input=input.encode()).decode().rstrip("\n")


def environment() -> dict[str, str]:
    """The process's environment, in which git has no configuration of the person's own.

    It must not change what the tool reads and writes.
    """
    clean = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    clean["GIT_NO_REPLACE_OBJECTS"] = "1"
    outer = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return outer | clean


def _git_bytes(tree: Path, *arguments: str, input: bytes = b"", stops: bool = False) -> bytes:
    settings = ["core.autocrlf=false", "safe.directory=*"]
    settings += [f"core.{name}File={os.devnull}" for name in ("attributes", "excludes")]
    command = ["git", *(part for each in settings for part in ("-c", each)), *arguments]
    try:
        child = subprocess.run(
            command, cwd=tree, input=input, capture_output=True, check=False, env=environment()
        )
    except FileNotFoundError:
        raise OverlayError(
            Exit.USAGE, "git is not installed", next_step="install git and run it again"
        ) from None
    if child.returncode and not (stops and (tree / ".git" / "rebase-merge").exists()):
        said = child.stderr.decode(errors="replace").strip()
        raise OverlayError(
            Exit.FAULT,
            f"git {arguments[0]} failed: {said}",
            subject=tree,
            next_step="delete build/edit and lay it out again, or mend the tree with git",
        )
    return child.stdout
