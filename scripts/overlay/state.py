"""The state of an installation, read off the checksums of its files."""

from __future__ import annotations

import enum
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from overlay import bytecode, record
from overlay import pin as pins
from overlay.errors import Exit, OverlayError, denied
from overlay.files import LARGEST, STAGED, kind, read
from overlay.installation import Installation
from overlay.pin import PACKAGE, sha256
from overlay.source import PROVENANCE, Overlay


class State(enum.Enum):
    """The state of a file, of RECORD, or of a whole installation."""

    PRISTINE = "pristine"
    OVERLAID = "overlaid"
    PARTIAL = "partial"
    FOREIGN = "foreign"
    MISSING = "missing"
    ABSENT = "absent"


@dataclass(frozen=True)
class FileState:
    """One file: what it is, and what lies there.

    Attributes:
        path: relative to site-packages.
        state: for a file that we add, pristine means that nothing lies there.
        sha256: of what lies there, or None if that is not a file.
        data: its bytes, or None.
        found: in words, what lies there.
    """

    path: str
    state: State
    sha256: str | None
    data: bytes | None
    found: str


@dataclass
class Inspection:
    """Everything that ``status`` says about an installation.

    Attributes:
        files: every file of the overlay, sorted by path.
        record: the state of RECORD, or None if there is none.
        leftovers: staged files, and directories of ours without a file, that a
            killed run left behind.
        stale: bytecode that would run instead of its source.
    """

    installation: Installation
    overlay: Overlay
    files: list[FileState]
    record: State | None = None
    record_bytes: bytes = b""
    leftovers: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    @property
    def state(self) -> State:
        """The installation's state."""
        states = {file.state for file in self.files}
        if self.record is not None:
            states.add(self.record)
        if states & {State.FOREIGN, State.MISSING}:
            return State.FOREIGN
        if len(states) > 1 or self.leftovers or self.stale:
            return State.PARTIAL
        return states.pop()

    @cached_property
    def digest(self) -> str:
        """One SHA-256 over all files as they lie there, to compare machines by.

        Of the lines ``sha256  path``, sorted by path, with ``-`` for a file that is
        not there: what ``sha256sum`` would print for them.
        """
        lines = (f"{file.sha256 or '-'}  {file.path}\n" for file in self.files)
        return sha256("".join(lines).encode(errors="surrogateescape"))

    @property
    def strange(self) -> list[FileState]:
        """The files that are not known, and those that are missing."""
        return [file for file in self.files if file.state in (State.FOREIGN, State.MISSING)]

    @cached_property
    def recorded(self) -> Inspection | None:
        """The installation seen with the version of the overlay that it keeps a record of.

        None if that is this version, if it explains less than this one, or if the record
        cannot be believed. The record may have been prepared by anyone. So it may only
        name files that some version of ours changes, with upstream's checksums as we know
        them, and everything else it names lies in our own directory.
        """
        if self.state is not State.FOREIGN:
            return None
        pin = self.overlay.pin
        try:
            overlay = Overlay.installed(self.installation.site)
            if overlay is None or overlay.pin_bytes == self.overlay.pin_bytes:
                return None
            known = {*pin.upstream.items()}
            known |= {(p, d) for p, d in pins.releases().upstream if p not in pin.upstream}
            if not known.issuperset(overlay.pin.upstream.items()):
                return None
            seen = inspect(self.installation, overlay)
        except OverlayError:
            return None  # What lies there is damaged; it stays foreign.
        _miss_patches(seen)
        return seen if len(seen.strange) <= len(self.strange) else None

    @property
    def other(self) -> Inspection | None:
        """Another version of the overlay that can be taken off: no file is strange to it."""
        seen = self.recorded
        return seen if seen and seen.state in (State.OVERLAID, State.PARTIAL) else None

    @cached_property
    def older(self) -> str | None:
        """What the version is called that the installation keeps a record of, if another."""
        if self.recorded is None:
            return None
        overlay = self.recorded.overlay
        released = pins.releases().versions.get(sha256(overlay.pin_bytes))
        return released or f"{overlay.pin.overlay} (unreleased)"

    def pristine(self, path: str) -> bytes:
        """A target's pristine bytes, whichever lie there."""
        file = self.file(path)
        assert file.data is not None
        if file.state is State.OVERLAID:
            return self.overlay.pristine_bytes(path, file.data)
        return file.data

    def overlaid(self, path: str) -> bytes:
        """A target's overlaid bytes, whichever lie there."""
        file = self.file(path)
        assert file.data is not None
        if file.state is State.OVERLAID:
            return file.data
        return self.overlay.overlaid_bytes(path, file.data)

    def file(self, path: str) -> FileState:
        """The file at ``path``, which is one of the overlay's."""
        return next(file for file in self.files if file.path == path)

    @cached_property
    def changed_rows(self) -> dict[bytes, bytes]:
        """RECORD's row of each target, pristine to overlaid."""
        return {
            record.row(path, self.pristine(path)): record.row(path, self.overlaid(path))
            for path in sorted(self.overlay.series.paths())
        }


def inspect(installation: Installation, overlay: Overlay) -> Inspection:
    """Look at every file of ``overlay`` in ``installation``; change nothing.

    Raises:
        OverlayError: a file may not be read.
    """
    paths = sorted([*overlay.targets, *overlay.added])
    try:
        found = Inspection(
            installation, overlay, [_file(installation.site, overlay, path) for path in paths]
        )
        found.files += _strangers(installation.site, overlay)
        found.files += _odd_caches(installation.site, overlay)
        found.files.sort(key=lambda file: file.path)
        _look_aside(found)
        if installation.record and found.state is not State.FOREIGN:
            _look_at_record(found, installation.record)
    except OSError as error:
        raise denied(error, "the installation cannot be looked at") from None
    return found


def _miss_patches(seen: Inspection) -> None:
    """Miss the patches that a record lacks, if upstream's files cannot be had without them."""
    try:
        for file in seen.files:
            if file.path in seen.overlay.pin.upstream and file.state is State.OVERLAID:
                seen.pristine(file.path)
    except OverlayError:
        for at, file in enumerate(seen.files):
            if file.path.startswith(PROVENANCE + "/") and file.state is State.PRISTINE:
                seen.files[at] = replace(file, state=State.MISSING)
        if not seen.strange:
            seen.files.append(_foreign(PROVENANCE, "patches that do not fit the files"))


def _foreign(path: str, found: str) -> FileState:
    """What is not to be touched, and in words what it is."""
    return FileState(path, State.FOREIGN, None, None, found)


def _file(site: Path, overlay: Overlay, path: str) -> FileState:
    target = path in overlay.pin.upstream
    if link := _link_above(site, path):
        return _foreign(path, f"{link} is not a plain directory")
    full = site / path
    try:
        status = full.stat()
    except OSError:
        if full.is_symlink():
            return _foreign(path, "a link that leads nowhere")
        if os.path.lexists(full):
            raise
        return FileState(path, State.MISSING if target else State.PRISTINE, None, None, "nothing")
    if word := kind(status.st_mode):
        return _foreign(path, word)
    if status.st_size > LARGEST:
        return _foreign(path, f"{status.st_size} bytes")
    data = read(full)
    digest = sha256(data)
    if digest == overlay.digest_of(path):
        state = State.OVERLAID
    elif target and digest == overlay.pin.upstream[path]:
        state = State.PRISTINE
    else:
        state = State.FOREIGN
    return FileState(path, state, digest, data, f"SHA-256 {digest}")


def _link_above(site: Path, path: str) -> str | None:
    """The first directory on the way to ``path`` that is a link or not a directory."""
    for parent in reversed(Path(path).parents[:-1]):
        try:
            if not stat.S_ISDIR(os.lstat(site / parent).st_mode):
                return str(site / parent)
        except FileNotFoundError:
            return None
    return None


def _strangers(site: Path, overlay: Overlay) -> list[FileState]:
    """Files in our own directory that no version of ours put there."""
    ours = {site / path for path in overlay.added}
    return [
        _foreign(str(path.relative_to(site)), "a file that is not the overlay's")
        for path in sorted((site / PACKAGE).rglob("*"))
        if path not in ours
        and "__pycache__" not in path.relative_to(site).parts
        and not (path.is_dir() and not path.is_symlink())
    ]


def _odd_caches(site: Path, overlay: Overlay) -> list[FileState]:
    """Directories of bytecode that are links, and bytecode that is not a plain file."""
    modules = [path for path in (*overlay.targets, *overlay.added) if path.endswith(".py")]
    folders = sorted({str(Path(path).parent / "__pycache__") for path in modules})
    found = [
        _foreign(folder, "a link, and no plain directory")
        for folder in folders
        if os.path.lexists(site / folder) and not stat.S_ISDIR(os.lstat(site / folder).st_mode)
    ]
    for pyc in (pyc for path in modules for pyc in bytecode.cached(site / path)):
        if pyc.exists() and (word := kind(pyc.stat().st_mode)):
            found.append(_foreign(os.path.relpath(pyc, site), word))
    return found


def _look_aside(found: Inspection) -> None:
    site = found.installation.site
    folders = {(site / path).parent for path in found.overlay.targets}
    folders |= {folder / "__pycache__" for folder in folders} | {(site / PACKAGE).parent}
    if found.installation.record:
        folders.add(found.installation.record.parent)
    for folder in sorted(folders):
        if folder.is_dir():
            found.leftovers += sorted(
                str((folder / name).relative_to(site))
                for name in os.listdir(folder)
                if name.startswith(STAGED)
            )
    added = [f for f in found.files if f.path.startswith(PACKAGE + "/")]
    if os.path.lexists(site / PACKAGE) and all(f.state is State.PRISTINE for f in added):
        found.leftovers.append(PACKAGE)
    for file in found.files:
        if file.path.endswith(".py"):
            pycs = bytecode.stale(site / file.path, file.data)
            found.stale += [str(pyc) for pyc in pycs]


def _look_at_record(found: Inspection, path: Path) -> None:
    if not path.is_file() or _link_above(path.parent.parent, f"{path.parent.name}/RECORD"):
        name = str(path.relative_to(found.installation.site))
        found.files.append(_foreign(name, "not a plain file"))
        return
    data = found.record_bytes = read(path)
    restored = record.restore(data, found.changed_rows)
    listed = record.rows_of_ours(data)
    needed = {
        record.row(f.path, f.data or b"") for f in found.files if f.path in found.overlay.added
    }
    if data == restored:
        found.record = State.PRISTINE
    elif needed <= set(listed) and data == record.overlay(restored, found.changed_rows, listed):
        found.record = State.OVERLAID
    else:
        found.record = State.PARTIAL


def refuse_foreign(found: Inspection) -> None:
    """Raise if ``found`` holds a file that is not known.

    Raises:
        OverlayError: naming the first such file, and how many more there are.
    """
    if not found.strange:
        return
    strange = found.strange
    if found.recorded and not found.other:
        theirs = {file.path for file in found.recorded.files}
        strange = [*found.recorded.strange, *(f for f in strange if f.path not in theirs)]
    raise refusal(found, strange)


def refusal(found: Inspection, strange: Sequence[FileState]) -> OverlayError:
    """What is wrong with the first of some files that are not known, and what to do."""
    pin, installation = found.overlay.pin, found.installation
    file = strange[0]
    more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
    title = f"{installation.title} in {installation.site}"
    if installation.release != pin.release and any(f.path in pin.upstream for f in strange):
        return OverlayError(
            Exit.RELEASE,
            f"is not the file of vLLM {pin.release}{more}; this is {title}",
            subject=installation.site / file.path,
            expected=_expected(found.overlay, file.path),
            found=file.found,
            next_step=f"install vLLM {pin.release}, or take the overlay that is for this release",
        )
    overlay, whose = found.overlay, "the overlay"
    if found.recorded and file.path in {f.path for f in found.recorded.files}:
        if found.other:
            part = "in part " if found.other.state is State.PARTIAL else ""
            return OverlayError(
                Exit.FOREIGN,
                f"is overlaid {part}by overlay {found.older}; this is {pin.overlay}",
                subject=installation.site,
                next_step="`apply` replaces it with this one, `revert` takes it off",
            )
        overlay, whose = found.recorded.overlay, f"overlay {found.older}"
    expected, anew = _expected(overlay, file.path), f"reinstall {installation.title}"
    if file.path in overlay.pin.upstream:
        reason = f"is neither upstream's nor {whose}'s"
        next_step = f"keep your change elsewhere and {anew}, then apply"
    elif file.path.startswith(PROVENANCE) and overlay is not found.overlay:
        reason = f"is missing or damaged, and {whose} cannot be taken off without it"
        expected = expected and expected.removesuffix(", or nothing")
        next_step = f"{anew}, then apply"
    elif installation.record and file.path == os.path.relpath(
        installation.record, installation.site
    ):
        reason, next_step = "is not a plain file", f"put the installer's RECORD back, or {anew}"
    else:
        named = file.path in overlay.added
        reason = f"is not {whose}'s file" if named else f"is not a file of {whose}"
        next_step = "move it away, then run the same command again"
    return OverlayError(
        Exit.FOREIGN,
        reason + more,
        subject=installation.site / file.path,
        expected=expected,
        found=file.found,
        next_step=next_step,
    )


def _expected(overlay: Overlay, path: str) -> str | None:
    after = overlay.pin.result.get(path)
    if path in overlay.pin.upstream:
        before = overlay.pin.upstream[path]
        return f"SHA-256 {before} (vLLM {overlay.pin.release}) or {after} (overlaid)"
    return f"SHA-256 {after}, or nothing" if after else None
