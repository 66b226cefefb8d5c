"""State of an installation, by the checksums of its files."""

from __future__ import annotations

import enum
import os
import re
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from overlay import bytecode, record
from overlay import pin as pins
from overlay.errors import OverlayError, denied
from overlay.files import STAGED, odd, read, staged_in
from overlay.installation import Installation
from overlay.interpreter import Hung
from overlay.pin import PACKAGE, sha256
from overlay.source import PIN, PROVENANCE, Overlay


class State(enum.Enum):
    """State of a file, of RECORD, or of a whole installation."""

    PRISTINE = "pristine"
    OVERLAID = "overlaid"
    PARTIAL = "partial"
    FOREIGN = "foreign"
    MISSING = "missing"
    ABSENT = "absent"
    OTHER = "other"


@dataclass(frozen=True)
class FileState:
    """State of one file.

    Attributes:
        path: relative to site-packages.
        state: pristine for an added file that does not exist.
        sha256: None if no regular file was read.
        data: the bytes read, or None.
        description: a phrase for the present content.
    """

    path: str
    state: State
    sha256: str | None
    data: bytes | None
    description: str


@dataclass
class Inspection:
    """Comparison of an installation with one version of the overlay.

    Attributes:
        files: every file of the overlay, sorted by path.
        record: the state of RECORD, or None without one.
        leftovers: staged files of a killed run, and our own directory if it is empty.
        stale: bytecode that Python would run although it is not that of its source.
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
        """State of the installation."""
        if self.foreign_files:
            return State.FOREIGN
        states = {file.state for file in self.files} | ({self.record} if self.record else set())
        if len(states) > 1 or self.leftovers or self.stale:
            return State.PARTIAL
        return states.pop()

    @cached_property
    def digest(self) -> str:
        """One SHA-256 over all files as they are, to compare machines."""
        return pins.digest_of((file.path, file.sha256) for file in self.files)

    @property
    def paths(self) -> set[str]:
        """Paths of all files."""
        return {file.path for file in self.files}

    @property
    def foreign_files(self) -> list[FileState]:
        """Foreign and missing files; either makes the installation foreign."""
        return [file for file in self.files if file.state in (State.FOREIGN, State.MISSING)]

    @cached_property
    def by_installed(self) -> Inspection | None:
        """Comparison with the overlay version in the installation's provenance.

        None if no file is foreign, or if the provenance is missing, untrusted or from this version.
        Provenance can be forged. Outside our own directory it may therefore only list files that a
        known version patches, with upstream's checksums.
        """
        if self.state is not State.FOREIGN:
            return None
        try:
            overlay = Overlay.installed(self.installation.site)
            if overlay is None or overlay.pin_bytes == self.overlay.pin_bytes:
                return None
            known = {**pins.EARLIER, **(self.overlay.base or self.overlay).pin.upstream}
            if not known.items() >= overlay.pin.upstream.items():
                return None
            installed = inspect(self.installation, overlay)
        except Hung:
            raise
        except OverlayError:
            return None  # A damaged provenance: the installation stays foreign.
        _require_patches(installed)
        return installed

    @property
    def beyond(self) -> list[FileState]:
        """Foreign files that :attr:`by_installed` does not know; empty without it."""
        known = self.by_installed.paths if self.by_installed else self.paths
        return [file for file in self.foreign_files if file.path not in known]

    @property
    def compared(self) -> Inspection:
        """Comparison with the installed version if its record was checked, else this one."""
        return self.by_installed or self

    @property
    def condition(self) -> State:
        """The state, with OTHER for another version or part that `apply` replaces."""
        return State.OTHER if self.replaceable and not self.beyond else self.state

    @property
    def described(self) -> str:
        """The state and, if it is not this one, the installed version."""
        installed, version = self.by_installed, self.installed_version
        if installed is None:
            return self.state.value
        if not self.replaceable:
            return f"foreign to overlay {version}"
        rest = f", foreign to overlay {self.overlay.pin.overlay}" if self.beyond else ""
        return f"{installed.state.value} by overlay {version}{rest}"

    @property
    def unknown(self) -> bool:
        """True if a version is installed that this version cannot revert."""
        foreign = any(file.path == PIN for file in self.foreign_files)
        return foreign and self.by_installed is None

    @property
    def replaceable(self) -> Inspection | None:
        """:attr:`by_installed` if it recognises every file, so that it can be reverted."""
        installed = self.by_installed
        known = installed and installed.state in (State.OVERLAID, State.PARTIAL)
        return installed if known else None

    @cached_property
    def installed_version(self) -> str | None:
        """Version of :attr:`by_installed` and its selection, or None."""
        if self.by_installed is None:
            return None
        overlay, base = self.by_installed.overlay, self.overlay.base or self.overlay
        version = overlay.pin.overlay
        if version == base.pin.overlay and overlay.pin_bytes != base.pin_bytes:
            version += "" if overlay.selection else " (another state)"
        return version + overlay.selection

    @property
    def downgrades(self) -> bool:
        """True if the installed version is newer than this one, by its numbers.

        What follows a ``+`` names a commit, which has no order.
        """
        versions = (each.overlay.pin.overlay for each in (self.by_installed or self, self))
        public = (text.partition("+")[0] for text in versions)
        installed, ours = ([*map(int, re.findall(r"\d{1,9}", text))] for text in public)
        return installed > ours

    def pristine(self, path: str) -> bytes:
        """Return a target's pristine bytes, from the pristine or the overlaid file."""
        file = self.file(path)
        assert file.data is not None
        laid = file.state is State.OVERLAID
        return self.overlay.pristine_bytes(path, file.data) if laid else file.data

    def overlaid(self, path: str) -> bytes:
        """Return a target's overlaid bytes, from the pristine or the overlaid file."""
        file = self.file(path)
        assert file.data is not None
        laid = file.state is State.OVERLAID
        return file.data if laid else self.overlay.overlaid_bytes(path, file.data)

    def file(self, path: str) -> FileState:
        """Return the state of the overlay's file at ``path``."""
        return next(file for file in self.files if file.path == path)

    @cached_property
    def changed_rows(self) -> dict[bytes, bytes]:
        """Pristine row to overlaid row of each target in RECORD."""
        return {
            record.row(path, self.pristine(path)): record.row(path, self.overlaid(path))
            for path in sorted(self.overlay.series.paths())
        }


def inspect(installation: Installation, overlay: Overlay) -> Inspection:
    """Compare an installation with ``overlay``; OverlayError if a file is unreadable.

    >>> inspect(vllm, small).state
    <State.PRISTINE: 'pristine'>
    """
    paths = sorted([*overlay.targets, *overlay.added])
    try:
        files = [look(installation.site, overlay, path) for path in paths]
        files += _foreign_in_package(installation.site, overlay)
        files += _foreign_bytecode(installation.site, overlay)
        inspection = Inspection(installation, overlay, sorted(files, key=lambda file: file.path))
        _inspect_leftovers(inspection)
        if installation.record and inspection.state is not State.FOREIGN:
            _inspect_record(inspection, installation.record)
    except OSError as error:
        raise denied(error, "the installation cannot be inspected") from None
    return inspection


def _require_patches(installed: Inspection) -> None:
    """Mark patches as foreign from which upstream's files cannot be restored."""
    try:
        for file in installed.files:
            if file.path in installed.overlay.pin.upstream and file.state is State.OVERLAID:
                installed.pristine(file.path)
    except OverlayError:
        reason = "patches that do not restore upstream's files"
        installed.files.append(_foreign(f"{PROVENANCE}/patches", reason))


def _foreign(path: str, description: str) -> FileState:
    return FileState(path, State.FOREIGN, None, None, description)


def look(site: Path, overlay: Overlay, path: str) -> FileState:
    """Compare one file of an installation with ``overlay``; OSError if it is unreadable.

    >>> look(vllm.site, small, "vllm/one.py").state
    <State.PRISTINE: 'pristine'>
    """
    target = path in overlay.pin.upstream
    if link := _link_above(site, path):
        return _foreign(path, f"{link} is not a plain directory")
    full = site / path
    try:
        status = full.stat()
    except OSError:
        if full.is_symlink():
            return _foreign(path, "a dangling link")
        if os.path.lexists(full):
            raise
        return FileState(path, State.MISSING if target else State.PRISTINE, None, None, "nothing")
    if word := odd(status):
        return _foreign(path, word)
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
    """Return the first parent of ``path`` below ``site`` that is no plain directory, or None."""
    for parent in reversed(Path(path).parents[:-1]):
        try:
            if not stat.S_ISDIR(os.lstat(site / parent).st_mode):
                return str(site / parent)
        except FileNotFoundError:
            return None
    return None


def _foreign_in_package(site: Path, overlay: Overlay) -> list[FileState]:
    """Find files in our own directory that the overlay does not add."""
    ours = {site / path for path in overlay.added}
    return [
        _foreign(str(path.relative_to(site)), "a file that is not the overlay's")
        for path in sorted((site / PACKAGE).rglob("*"))
        if path not in ours
        and not any(
            p == "__pycache__" or p.startswith(STAGED) for p in path.relative_to(site).parts
        )
        and not (path.is_dir() and not path.is_symlink())
    ]


def _foreign_bytecode(site: Path, overlay: Overlay) -> list[FileState]:
    """Find linked ``__pycache__`` directories, and bytecode that is not a regular file."""
    modules = [path for path in (*overlay.targets, *overlay.added) if path.endswith(".py")]
    folders = sorted({str(Path(path).parent / "__pycache__") for path in modules})
    foreign = [
        _foreign(folder, "a link instead of a directory")
        for folder in folders
        if os.path.lexists(site / folder) and not stat.S_ISDIR(os.lstat(site / folder).st_mode)
    ]
    for pyc in (pyc for path in modules for pyc in bytecode.cached(site / path)):
        if pyc.exists() and (word := odd(pyc.stat())):
            foreign.append(_foreign(os.path.relpath(pyc, site), word))
    return foreign


def _inspect_leftovers(inspection: Inspection) -> None:
    site, record_file = inspection.installation.site, inspection.installation.record
    # An interrupted run may have staged another part or version of the overlay.
    staged = [*(site / "vllm").rglob(f"{STAGED}*")]
    staged += staged_in(record_file.parent) if record_file else []
    inspection.leftovers += sorted(str(path.relative_to(site)) for path in staged)
    added = [f for f in inspection.files if f.path.startswith(PACKAGE + "/")]
    if os.path.lexists(site / PACKAGE) and all(f.state is State.PRISTINE for f in added):
        inspection.leftovers.append(PACKAGE)
    modules = {
        site / file.path: file.data
        for file in inspection.files
        if file.path.endswith(".py") and file.data is not None
    }
    pycs = {pyc for path, data in modules.items() for pyc in bytecode.stale(path, data)}
    if not inspection.foreign_files:
        pycs.update(bytecode.false(inspection.installation.interpreter, modules))
    inspection.stale += sorted(map(str, pycs))


def _inspect_record(inspection: Inspection, path: Path) -> None:
    name = str(path.relative_to(inspection.installation.site))
    if not path.is_file() or _link_above(inspection.installation.site, name):
        inspection.files.append(_foreign(name, "not a plain file"))
        return
    data = inspection.record_bytes = read(path)
    restored = record.restore(data, inspection.changed_rows)
    listed = record.rows_of_ours(data)
    needed = {
        record.row(f.path, f.data or b"")
        for f in inspection.files
        if f.path in inspection.overlay.added
    }
    if data == restored:
        inspection.record = State.PRISTINE
    elif needed <= set(listed) and data == record.overlay(
        restored, inspection.changed_rows, listed
    ):
        inspection.record = State.OVERLAID
    else:
        inspection.record = State.PARTIAL
