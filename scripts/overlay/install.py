"""Write the overlay's files into an installation, and take them out again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from overlay import bytecode, record
from overlay import pin as pins
from overlay.errors import Exit, OverlayError, denied
from overlay.files import (
    finish_bytecode,
    make_directory,
    mount_points,
    prune,
    remove,
    remove_if_empty,
    sync,
    unchangeable,
    write,
)
from overlay.pin import PACKAGE
from overlay.processes import refuse_serving
from overlay.source import PROVENANCE
from overlay.staging import STAGED, Staging
from overlay.state import Inspection, State
from overlay.traits import traits

_CARRY_ON = "the installation is partial: run `apply` to carry on or `revert` to undo"


def refuse_unwritable(inspection: Inspection, changed: Iterable[str], force: bool) -> None:
    """Raise if a process serves from the installation, or a file cannot be changed.

    Args:
        inspection: the installation.
        changed: paths that the command would change.
        force: go on although a process serves from the installation.

    Raises:
        OverlayError: naming the processes or the file.
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
    for path in sorted(files | needed | caches):
        reason, way = unchangeable(path), "take the attribute off (chattr -i -a)"
        if str(path) in mounted and (path in files or path.is_relative_to(package)):
            reason, way = "is a mount of its own", "unmount it, or overlay what is mounted there"
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


def lay_over(inspection: Inspection, lock: int) -> None:
    """Stage every file, and rename them into place."""
    installation, overlay = inspection.installation, inspection.overlay
    site = installation.site
    state = {file.path: file.state for file in inspection.files}
    targets = [path for path in overlay.targets if state[path] is not State.OVERLAID]
    new = {path: inspection.overlaid(path) for path in targets}
    new |= {path: overlay.added_bytes(path) for path in overlay.added}
    package = site / PACKAGE
    with _staging() as staging:
        _clear(inspection)
        for path in targets:
            staging.file(site / path, new[path], inspection.file(path).data)
        pycs = _compile(inspection, staging, overlay.targets, lock)
        complete = all(state[path] is State.OVERLAID for path in overlay.added)
        if not complete:
            _stage_package(inspection, staging, new, lock)
        if installation.record:
            rows = [record.row(path, new[path]) for path in overlay.added]
            rows += _bytecode_rows(site, staging.newest(package))
            data = record.overlay(inspection.record_bytes, inspection.changed_rows, rows)
            staging.file(installation.record, data, inspection.record_bytes)
        for path in [*overlay.targets, *([] if complete else overlay.added)]:
            _forget(site / path)
        # Our package comes first: no seam may exist without the module that it calls, and
        # no file of this version without the patches that take it off.
        record_path = [] if installation.record is None else [installation.record]
        finals = [] if complete else [package]
        staging.commit([*finals, *record_path, *(site / path for path in targets), *pycs])


def _stage_package(
    inspection: Inspection, staging: Staging, new: Mapping[str, bytes], lock: int
) -> None:
    """Stage the directory of our own files, bytecode included."""
    site, overlay = inspection.installation.site, inspection.overlay
    package = site / PACKAGE
    model = traits(site / overlay.targets[0]).permissions
    parent = traits(package.parent).permissions
    now = {site / path: inspection.file(path).data for path in overlay.added}
    staged = staging.directory(package, parent, now)
    folders = {staged}
    for path in overlay.added:
        file = staged / Path(path).relative_to(PACKAGE)
        for folder in reversed([p for p in file.parents if staged in p.parents]):
            if folder not in folders:
                make_directory(folder, parent)
                folders.add(folder)
        write(file, new[path], model)
    modules = [Path(path) for path in overlay.added if path.endswith(".py")]
    if inspection.installation.interpreter:
        jobs = []
        for module in modules:
            source = staged / module.relative_to(PACKAGE)
            cache = source.parent / "__pycache__"
            if cache not in folders:
                make_directory(cache, parent)
                folders.add(cache)
            jobs.append(bytecode.Job(source, site / module, f"{cache}/"))
        names = bytecode.compile_modules(inspection.installation.interpreter, jobs, lock)
        for job, name in zip(jobs, names, strict=True):
            finish_bytecode(Path(job.out + name), model)
    for folder in folders:
        sync(folder)


def _compile(
    inspection: Inspection, staging: Staging, targets: Iterable[str], lock: int
) -> list[Path]:
    """Stage the bytecode of ``targets``. Returns: its final paths."""
    site, interpreter = inspection.installation.site, inspection.installation.interpreter
    if interpreter is None:
        return []
    jobs = []
    for path in targets:
        cache = (site / path).parent / "__pycache__"
        staging.ensure_directory(cache)
        jobs.append(bytecode.Job(staging.newest(site / path), site / path, f"{cache}/{STAGED}"))
    if not jobs:
        return []
    try:
        names = bytecode.compile_modules(interpreter, jobs, lock)
    except OverlayError:
        for cache in {job.final.parent / "__pycache__" for job in jobs}:
            for name in os.listdir(cache):
                if name.startswith(STAGED):
                    remove(cache / name)
        raise
    finals = []
    for job, name in zip(jobs, names, strict=True):
        finals.append(job.final.parent / "__pycache__" / name)
        staging.adopt_bytecode(finals[-1], job.final)
    return finals


def _bytecode_rows(site: Path, staged: Path) -> list[bytes]:
    """RECORD's rows for the bytecode in our package, whose directory is now ``staged``."""
    files = sorted(file.relative_to(staged) for file in staged.rglob("__pycache__/*.pyc"))
    return [f"{PACKAGE}/{file.as_posix()},,".encode() for file in files]


def take_off(inspection: Inspection, lock: int) -> None:
    """Rename upstream's files into place, and remove ours."""
    installation, overlay = inspection.installation, inspection.overlay
    site = installation.site
    state = {file.path: file.state for file in inspection.files}
    targets = [path for path in overlay.targets if state[path] is State.OVERLAID]
    old = {path: inspection.pristine(path) for path in targets}
    with _staging() as staging:
        _clear(inspection)
        for path in targets:
            staging.file(site / path, old[path], inspection.file(path).data)
        pycs, last = [], []
        if installation.record:
            last = [installation.record]
            data = record.restore(inspection.record_bytes, inspection.changed_rows)
            staging.file(installation.record, data, inspection.record_bytes)
            # Only bytecode that the installer had compiled is compiled again.
            pycs = _compile(
                inspection, staging, _compiled_by_installer(overlay.targets, data), lock
            )
        for path in overlay.targets:
            _forget(site / path)
        # The reverse of apply: our package goes last, and its pin at the very end.
        staging.commit([*(site / path for path in targets), *pycs, *last])
        ours = sorted(overlay.added, key=_lasting)
        staging.take_away({site / path: inspection.file(path).data for path in ours})
        prune(site / PACKAGE)
        for cache in {(site / path).parent / "__pycache__" for path in overlay.targets}:
            remove_if_empty(cache)


def _lasting(path: str) -> tuple[bool, bool, str]:
    """A sort key for our files by how long a revert needs them, the pin last."""
    return (path.endswith(f"/{pins.NAME}"), path.startswith(PROVENANCE + "/"), path)


def _compiled_by_installer(targets: Iterable[str], rows: bytes) -> list[str]:
    def listed(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return f"\n{folder}/__pycache__/{name[:-3]}.".encode() in rows

    return [path for path in targets if listed(path)]


def _clear(inspection: Inspection) -> None:
    """Remove what a killed run left, and bytecode that would run instead of its source."""
    site = inspection.installation.site
    for path in [*inspection.leftovers, *inspection.stale]:
        (prune if path == PACKAGE else remove)(site / path)


def _forget(source: Path) -> None:
    """Remove the bytecode of ``source``, of every interpreter, if it is a module."""
    for pyc in bytecode.cached(source) if source.suffix == ".py" else []:
        remove(pyc)


@contextmanager
def _staging() -> Iterator[Staging]:
    """A staging whose errors say whether files were changed already."""
    with Staging() as staging:
        try:
            yield staging
        except OSError as error:
            if isinstance(error.filename, str):  # Name the file, not the staged one.
                error.filename = error.filename.replace(STAGED, "")
            written = _CARRY_ON if staging.begun else "nothing was written"
            raise denied(error, written) from None
