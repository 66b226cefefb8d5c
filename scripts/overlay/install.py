"""Write the overlay's files into an installation, and restore upstream's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay import bytecode, record
from overlay import pin as pins
from overlay.errors import Exit, OverlayError, denied
from overlay.files import (
    COMING,
    GOING,
    STAGED,
    mount_points,
    prune,
    remove,
    remove_if_empty,
    staged_path,
    sync,
    unchangeable,
)
from overlay.pin import PACKAGE, sha256
from overlay.processes import refuse_serving
from overlay.source import PROVENANCE, Overlay
from overlay.staging import Staging
from overlay.state import FileState, Inspection, State
from overlay.traits import traits

#: The longest path that a system call takes, in bytes (path_resolution(7)).
_PATH_MAX = 4095
#: The longest suffix of a bytecode file while py_compile writes it.
_PYC = f".cpython-3xxt.opt-2.pyc.{'n' * 20}"
_CARRY_ON = "the installation is partial: the same command completes it, `revert` undoes it"


def refuse_unwritable(inspection: Inspection, changed: Iterable[str], force: bool) -> None:
    """Raise OverlayError if a process serves from the installation, or a file cannot be changed.

    ``changed`` lists the paths to change. ``force`` skips the check of processes.
    """
    if not force:
        refuse_serving(inspection.installation)
    site, package = inspection.installation.site, inspection.installation.site / PACKAGE
    files = {site / path for path in (*changed, *inspection.overlay.added)}
    files |= {pyc for path in files if path.suffix == ".py" for pyc in bytecode.cached(path)}
    files |= {inspection.installation.record} if inspection.installation.record else set()
    needed = {file.parent for file in files} | {package.parent}
    caches = {path.parent / "__pycache__" for path in files if path.suffix == ".py"}
    mounted = mount_points()
    for path in sorted(files):
        _refuse_long(path, site)
    for path in sorted(files | needed | caches):
        reason, way = unchangeable(path), "remove the attribute (chattr -i -a)"
        if str(path) in mounted and (path in files or path.is_relative_to(package)):
            reason, way = "is a mount point", "unmount it, or overlay the mounted original"
        if reason:
            raise OverlayError(
                Exit.DENIED,
                f"{reason}, and can be neither replaced nor removed; nothing was written",
                subject=path,
                next_step=f"{way}, and run the same command again",
            )
        if path in needed and path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise denied(OSError(number, os.strerror(number), str(path)), "nothing was written")


def _refuse_long(path: Path, site: Path) -> None:
    """Raise OverlayError if the staged name or path of a file would be too long."""
    names = [staged_path(path, COMING)]
    if path.suffix == ".py":
        # py_compile writes to a temporary file, whose name has another dot and a number.
        names.append(staged_path(path.parent / "__pycache__" / f"{path.stem}{_PYC}", COMING))
    for staged in names:
        parts = (len(os.fsencode(staged.name)), len(os.fsencode(staged)))
        for length, most in zip(parts, (os.pathconf(site, "PC_NAME_MAX"), _PATH_MAX), strict=True):
            if length > most:
                raise OverlayError(
                    Exit.DENIED,
                    f"has a name {length - most} bytes too long for its staged copy; "
                    "nothing was written",
                    subject=path,
                    next_step="install vLLM in a directory with a shorter path, or give the patch "
                    "a shorter name",
                )


def lay_over(inspection: Inspection, lock: int) -> None:
    """Apply the overlay: stage every file that is not overlaid, and rename it into place."""
    with _staging() as staging:
        _clear(inspection)
        _commit_ours(inspection, staging, _stage_ours(inspection, staging, lock))


def take_off(inspection: Inspection, lock: int) -> None:
    """Revert the overlay: stage upstream's files, rename them into place, and remove ours."""
    with _staging() as staging:
        _clear(inspection)
        _commit_upstreams(inspection, staging, _stage_upstreams(inspection, staging, lock))


def exchange(installed: Inspection, after: Inspection, lock: int, version: str | None) -> None:
    """Replace the installed version of the overlay by another.

    The files of both versions are staged before the first change. Lack of space, permission or an
    interpreter therefore leaves the old version in place.

    Args:
        installed: comparison with the installed version.
        after: comparison with the new version, predicted by :func:`taken_off`.
        lock: file descriptor of the installation's lock.
        version: name of the installed version.

    Raises:
        OverlayError: nothing was written; or the old version was removed, completely or in part,
            and the new one is not applied.
    """
    with _staging(COMING) as coming:
        _clear(installed)
        ours = _stage_ours(after, coming, lock)
        with _staging(GOING) as going:
            upstreams = _stage_upstreams(installed, going, lock)
            _commit_upstreams(installed, going, upstreams)
        coming.begun = True
        try:
            _commit_ours(after, coming, ours)
        except (OSError, OverlayError) as error:
            if isinstance(error, OSError):
                error = denied(error, "the installation is partial")
            raise OverlayError(
                error.code,
                f"version {version} of the overlay was removed, and this version is not applied: "
                f"{error.reason}",
                subject=error.subject,
                next_step="fix that and run the same command again",
            ) from None


def taken_off(installed: Inspection, inspection: Inspection) -> Inspection:
    """Predict the inspection after a revert of the installed version.

    ``installed`` compares files with the installed version, ``inspection`` with another version.

    Raises:
        OverlayError: the upstream files cannot be reconstructed.
    """
    overlay, files = inspection.overlay, []
    for path in sorted([*overlay.targets, *overlay.added]):
        if path in installed.overlay.pin.upstream:
            data = installed.pristine(path)
            files.append(FileState(path, State.PRISTINE, sha256(data), data, "upstream's"))
        elif path in installed.paths:
            files.append(FileState(path, State.PRISTINE, None, None, "nothing"))
        else:
            files.append(inspection.file(path))
    return Inspection(
        inspection.installation,
        overlay,
        files,
        installed.record and State.PRISTINE,
        record.restore(installed.record_bytes, installed.changed_rows),
    )


def rehearse(inspection: Inspection) -> None:
    """Rehearse :func:`lay_over`: produce, verify and compile its files.

    Raises:
        OverlayError: a file differs from its pin, or does not compile.
    """
    overlay, python = inspection.overlay, inspection.installation.interpreter
    new = {path: inspection.overlaid(path) for path in overlay.targets}
    new |= {path: overlay.added_bytes(path) for path in overlay.added}
    site = inspection.installation.site
    if python:
        bytecode.check_modules(python, {site / p: d for p, d in new.items() if p.endswith(".py")})


def rehearse_off(inspection: Inspection) -> None:
    """Rehearse :func:`take_off`: produce, verify and compile its files.

    Raises:
        OverlayError: upstream's bytes cannot be produced, or no longer compile.
    """
    site, python = inspection.installation.site, inspection.installation.interpreter
    old = {path: inspection.pristine(path) for path in inspection.overlay.targets}
    rows = record.restore(inspection.record_bytes, inspection.changed_rows)
    paths = _compiled_by_installer(inspection.overlay, rows)
    if python and paths:
        bytecode.check_modules(python, {site / path: old[path] for path in paths})


def _stage_ours(inspection: Inspection, staging: Staging, lock: int) -> list[list[Path]]:
    """Stage the overlay; return the groups of files to commit, in order."""
    overlay, site = inspection.overlay, inspection.installation.site
    lacking = {file.path for file in inspection.files if file.state is not State.OVERLAID}
    targets = [path for path in overlay.targets if path in lacking]
    pin, *ours = sorted(overlay.added, key=_lasting, reverse=True)
    new = {path: inspection.overlaid(path) for path in targets}
    new |= {path: overlay.added_bytes(path) for path in overlay.added}
    for path in targets:
        staging.replacement(site / path, new[path], inspection.file(path).data)
    permissions = traits(site / overlay.targets[0]).permissions
    for path in [path for path in (pin, *ours) if path in lacking]:
        staging.directory((site / path).parent)
        staging.file(site / path, new[path], None, permissions)
    pycs = _stage_bytecode(inspection, staging, [*overlay.targets, *overlay.added], lock)
    last = []
    if file := inspection.installation.record:
        last = [file]
        compiled = sorted(os.path.relpath(pyc, site) for pyc in pycs)
        rows = [record.row(path, new[path]) for path in overlay.added]
        rows += [f"{path},,".encode() for path in compiled if path.startswith(f"{PACKAGE}/")]
        data = record.overlay(inspection.record_bytes, inspection.changed_rows, rows)
        staging.replacement(file, data, inspection.record_bytes)
    # The pin and the patches come first, then the modules: no seam may exist without the module
    # that it calls, and no file without the provenance that reverts it.
    groups = [[site / path for path in group if path in lacking] for group in ([pin], ours)]
    return [*groups, last, [*(site / path for path in targets), *pycs]]


def _commit_ours(inspection: Inspection, staging: Staging, groups: Iterable[list[Path]]) -> None:
    overlay, site = inspection.overlay, inspection.installation.site
    _forget(site, [*overlay.targets, *overlay.added])
    for group in groups:
        staging.commit(group)


def _stage_upstreams(inspection: Inspection, staging: Staging, lock: int) -> list[list[Path]]:
    """Stage upstream's files; return the groups of files to commit, in order."""
    overlay, site = inspection.overlay, inspection.installation.site
    targets = [path for path in overlay.targets if inspection.file(path).state is State.OVERLAID]
    old = {path: inspection.pristine(path) for path in targets}
    for path in targets:
        staging.replacement(site / path, old[path], inspection.file(path).data)
    pycs, last = [], []
    if file := inspection.installation.record:
        last = [file]
        data = record.restore(inspection.record_bytes, inspection.changed_rows)
        staging.replacement(file, data, inspection.record_bytes)
        # Compile only the modules whose bytecode RECORD lists: the installer compiled them.
        pycs = _stage_bytecode(inspection, staging, _compiled_by_installer(overlay, data), lock)
    return [[*(site / path for path in targets), *pycs], last]


def _commit_upstreams(
    inspection: Inspection, staging: Staging, groups: Iterable[list[Path]]
) -> None:
    overlay, site = inspection.overlay, inspection.installation.site
    _forget(site, overlay.targets)
    # In the reverse order of apply, our files are removed last, and the pin after all others. Until
    # then an interrupted run leaves the installation partial.
    for group in groups:
        staging.commit(group)
    for folder in sorted({(site / path).parent for path in overlay.targets}):
        remove_if_empty(folder / "__pycache__")
        sync(folder)
    ours = sorted(overlay.added, key=_lasting)
    staging.take_away({site / path: inspection.file(path).data for path in ours})
    prune(site / PACKAGE)
    sync((site / PACKAGE).parent)


def _lasting(path: str) -> tuple[bool, bool, str]:
    """Return the sort key of our files in a revert: modules, then patches, then the pin."""
    return (path.endswith(f"/{pins.NAME}"), path.startswith(PROVENANCE + "/"), path)


def _stage_bytecode(
    inspection: Inspection, staging: Staging, paths: Iterable[str], lock: int
) -> list[Path]:
    """Stage the bytecode of the modules among ``paths``; return its final paths."""
    installation = inspection.installation
    if installation.interpreter is None:
        return []
    sources = [installation.site / path for path in paths if path.endswith(".py")]
    return staging.bytecode(sources, installation.interpreter, lock)


def _compiled_by_installer(overlay: Overlay, rows: bytes) -> list[str]:
    def listed(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return f"\n{folder}/__pycache__/{name[:-3]}.".encode() in rows

    return [path for path in overlay.targets if listed(path)]


def _clear(inspection: Inspection) -> None:
    """Remove leftovers of a killed run, and stale bytecode."""
    site = inspection.installation.site
    for path in [*inspection.leftovers, *inspection.stale]:
        (prune if path == PACKAGE else remove)(site / path)


def _forget(site: Path, paths: Iterable[str]) -> None:
    """Remove the bytecode of the modules among ``paths``, for all interpreters."""
    for path in paths:
        for pyc in bytecode.cached(site / path) if path.endswith(".py") else []:
            remove(pyc)


@contextmanager
def _staging(prefix: str = STAGED) -> Iterator[Staging]:
    """Open a :class:`Staging`; turn an OSError in it into an OverlayError."""
    with Staging(prefix) as staging:
        try:
            yield staging
        except OSError as error:
            if isinstance(error.filename, str):  # Name the final file.
                error.filename = error.filename.replace(prefix, "")
            written = _CARRY_ON if staging.begun else "nothing was written"
            raise denied(error, written) from None
