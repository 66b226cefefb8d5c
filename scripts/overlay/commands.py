"""apply, revert, status, verify and diff."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from overlay import bytecode, record
from overlay import pin as pins
from overlay.errors import Exit, OverlayError, denied
from overlay.files import (
    STAGED,
    Staging,
    fixed,
    keep,
    make_directory,
    mount_points,
    prune,
    remove,
    remove_if_empty,
    sync,
    traits,
    write,
)
from overlay.installation import Installation
from overlay.lock import exclusive
from overlay.pin import PACKAGE
from overlay.processes import refuse_serving
from overlay.source import PROVENANCE, Overlay
from overlay.state import Inspection, State, inspect, refuse_foreign

_CARRY_ON = "the installation is partial: run `apply` to carry on or `revert` to undo"


@dataclass
class Outcome:
    """What a command did, or would do.

    Attributes:
        inspection: the installation afterwards (before, in a dry run).
        changed: paths written or removed, relative to site-packages.
        notes: sentences for a person.
    """

    inspection: Inspection
    changed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Options:
    """How a command that writes is to go about it."""

    dry_run: bool = False
    force: bool = False
    wait: float = 30.0


def apply(installation: Installation, overlay: Overlay, options: Options) -> Outcome:
    """Lay ``overlay`` over ``installation``; carry on after a run that was cut off.

    Raises:
        OverlayError: refused, with nothing written; or cut off by the system, with
            the installation partial.
    """
    with exclusive(installation.site, options.wait) as lock:
        found = inspect(installation, overlay)
        notes = []
        if older := found.other:
            version = found.older
            notes.append(f"replaces version {version} of the overlay")
            theirs = {file.path for file in older.files}
            refuse_foreign(replace(found, files=[f for f in found.files if f.path not in theirs]))
            _prove(found, older)
            both = [*found.files, *older.files]
            _permit(older, [file.path for file in both], options)
            if options.dry_run:
                return Outcome(found, sorted({f.path for f in both}), notes)
            _revert(older, lock)
            try:
                return _lay_over(inspect(installation, overlay), notes, options, lock)
            except OverlayError as error:
                raise OverlayError(
                    error.code,
                    f"version {version} of the overlay was taken off, and this one is not on: "
                    + error.reason.removesuffix("; nothing was written"),
                    subject=error.subject,
                    next_step="mend that and run `apply` again",
                ) from None
        return _lay_over(found, notes, options, lock)


def _lay_over(found: Inspection, notes: list[str], options: Options, lock: int) -> Outcome:
    installation = found.installation
    refuse_foreign(found)
    if found.state is State.OVERLAID:
        return Outcome(found, notes=["nothing to do: it is overlaid already", *notes])
    changed = [f.path for f in found.files if f.state is not State.OVERLAID]
    if installation.interpreter is None:
        notes.append("no interpreter is known here: bytecode is left to the first import")
    if installation.record is None:
        notes.append("there is no RECORD: revert before you uninstall or replace vLLM")
    _permit(found, changed, options)
    if not options.dry_run:
        _apply(found, lock)
        found = inspect(installation, found.overlay)
    return Outcome(found, changed, notes)


def _prove(found: Inspection, older: Inspection) -> None:
    """Raise now, not after the older version is gone, if ours cannot be made."""
    for path in found.overlay.added:
        found.overlay.added_bytes(path)
    for path in found.overlay.targets:
        known = older if path in older.overlay.pin.upstream else found
        found.overlay.overlaid_bytes(path, known.pristine(path))


def revert(installation: Installation, overlay: Overlay, options: Options) -> Outcome:
    """Give back upstream's files, from an overlaid or a partial installation.

    Takes off any version of the overlay that the installation has a record of.

    Raises:
        OverlayError: as for :func:`apply`.
    """
    with exclusive(installation.site, options.wait) as lock:
        found = inspect(installation, overlay)
        notes = []
        if older := found.other:
            notes.append(f"takes off version {found.older} of the overlay")
        else:
            refuse_foreign(found)
            if found.state is State.PRISTINE:
                return Outcome(found, notes=["nothing to do: it is pristine"])
        chosen = older or found
        changed = [f.path for f in chosen.files if f.state is State.OVERLAID]
        _permit(chosen, changed, options)
        if not options.dry_run:
            _revert(chosen, lock)
            found = inspect(installation, overlay)
            refuse_foreign(found)
        return Outcome(found, changed, notes)


def status(installation: Installation, overlay: Overlay) -> Outcome:
    """Look, and write nothing."""
    return Outcome(inspect(installation, overlay))


def problem(found: Inspection, want_overlaid: bool) -> OverlayError | None:
    """What is wrong with an installation, for ``status`` and ``verify``; None if nothing is."""
    try:
        refuse_foreign(found)
    except OverlayError as error:
        return error
    if found.state is State.PARTIAL:
        code, reason = Exit.PARTIAL, "a run was cut off"
        next_step = "`apply` carries on, `revert` undoes"
    elif found.state is State.PRISTINE and want_overlaid:
        code, reason, next_step = Exit.PRISTINE, "nothing is laid over it", "run `apply`"
    else:
        return None
    reason = f"{found.installation.title} is {found.state.value}: {reason}"
    return OverlayError(code, reason, subject=found.installation.site, next_step=next_step)


def diff(
    installation: Installation, overlay: Overlay, context: int | None, added: bool
) -> Iterator[str]:
    """What the overlay changes, as unified diffs with context, line by line.

    Args:
        installation: where upstream's bytes come from; pristine or overlaid.
        overlay: the overlay to show.
        context: lines of context, or None for the whole file.
        added: show the files that the overlay adds, too.

    Raises:
        OverlayError: a file is foreign.
    """
    found = inspect(installation, overlay)
    refuse_foreign(found)
    for path in overlay.targets:
        old, new = _lines(found.pristine(path)), _lines(found.overlaid(path))
        around = max(len(old), len(new)) if context is None else context
        yield from difflib.unified_diff(old, new, f"a/{path}", f"b/{path}", n=around)
    for path in overlay.added if added else []:
        new = _lines(overlay.added_bytes(path))
        yield from difflib.unified_diff([], new, "/dev/null", f"b/{path}")


def _lines(data: bytes) -> list[str]:
    text = data.decode(errors="surrogateescape")
    return [line + "\n" for line in text.removesuffix("\n").split("\n")] if text else []


def _permit(found: Inspection, changed: Iterable[str], options: Options) -> None:
    """Raise if something is at work there, or if some file cannot be changed at all."""
    if not options.force:
        refuse_serving(found.installation)
    site, package = found.installation.site, found.installation.site / PACKAGE
    files = {site / path for path in (*changed, *found.overlay.added)}
    files |= {pyc for path in files if path.suffix == ".py" for pyc in bytecode.cached(path)}
    files |= {found.installation.record} if found.installation.record else set()
    needed = {file.parent for file in files} | {package.parent}
    caches = {path.parent / "__pycache__" for path in files if path.suffix == ".py"}
    mounted = mount_points()
    for path in sorted(files | needed | caches):
        reason, way = fixed(path), "take the attribute off (chattr -i -a)"
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


def _apply(found: Inspection, lock: int) -> None:
    site, overlay, installation = found.installation.site, found.overlay, found.installation
    state = {file.path: file.state for file in found.files}
    targets = [path for path in overlay.targets if state[path] is not State.OVERLAID]
    new = {path: found.overlaid(path) for path in targets}
    new |= {path: overlay.added_bytes(path) for path in overlay.added}
    package = site / PACKAGE
    with _staging() as staging:
        _clear(found)
        for path in targets:
            staging.file(site / path, new[path], found.file(path).data)
        pycs = _compile(found, staging, overlay.targets, lock)
        complete = all(state[path] is State.OVERLAID for path in overlay.added)
        if not complete:
            _stage_package(found, staging, new, lock)
        if installation.record:
            rows = [record.row(path, new[path]) for path in overlay.added]
            rows += _bytecode_rows(site, staging.newest(package))
            data = record.overlay(found.record_bytes, found.changed_rows, rows)
            staging.file(installation.record, data, found.record_bytes)
        for path in [*overlay.targets, *([] if complete else overlay.added)]:
            _forget(site / path)
        # Our package first, so that no seam is ever without what it calls, and no
        # trace of this version is without the patches that take it off.
        record_path = [] if installation.record is None else [installation.record]
        finals = [] if complete else [package]
        staging.commit([*finals, *record_path, *(site / path for path in targets), *pycs])


def _stage_package(
    found: Inspection, staging: Staging, new: Mapping[str, bytes], lock: int
) -> None:
    """Stage the directory of our own files, bytecode included."""
    site, overlay = found.installation.site, found.overlay
    package = site / PACKAGE
    model = traits(site / overlay.targets[0]).of_another
    parent = traits(package.parent).of_another
    now = {site / path: found.file(path).data for path in overlay.added}
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
    if found.installation.interpreter:
        jobs = []
        for module in modules:
            source = staged / module.relative_to(PACKAGE)
            cache = source.parent / "__pycache__"
            if cache not in folders:
                make_directory(cache, parent)
                folders.add(cache)
            jobs.append(bytecode.Job(source, site / module, f"{cache}/"))
        names = bytecode.compile_modules(found.installation.interpreter, jobs, lock)
        for job, name in zip(jobs, names, strict=True):
            keep(Path(job.out + name), model)
    for folder in folders:
        sync(folder)


def _compile(found: Inspection, staging: Staging, targets: Iterable[str], lock: int) -> list[Path]:
    """Stage the bytecode of ``targets``; the final paths."""
    site, interpreter = found.installation.site, found.installation.interpreter
    if interpreter is None:
        return []
    jobs = []
    for path in targets:
        cache = (site / path).parent / "__pycache__"
        staging.folder(cache)
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
    finals = [
        job.final.parent / "__pycache__" / name for job, name in zip(jobs, names, strict=True)
    ]
    for job, final in zip(jobs, finals, strict=True):
        staging.made(final, job.final)
    return finals


def _bytecode_rows(site: Path, staged: Path) -> list[bytes]:
    """RECORD's rows for the bytecode in our package, which lies in ``staged`` now."""
    files = sorted(file.relative_to(staged) for file in staged.rglob("__pycache__/*.pyc"))
    return [f"{PACKAGE}/{file.as_posix()},,".encode() for file in files]


def _revert(found: Inspection, lock: int) -> None:
    site, overlay, installation = found.installation.site, found.overlay, found.installation
    state = {file.path: file.state for file in found.files}
    targets = [path for path in overlay.targets if state[path] is State.OVERLAID]
    old = {path: found.pristine(path) for path in targets}
    with _staging() as staging:
        _clear(found)
        for path in targets:
            staging.file(site / path, old[path], found.file(path).data)
        pycs, last = [], []
        if installation.record:
            last = [installation.record]
            data = record.restore(found.record_bytes, found.changed_rows)
            staging.file(installation.record, data, found.record_bytes)
            # Bytecode is made again only where the installer had made it.
            pycs = _compile(found, staging, _compiled_by_installer(overlay.targets, data), lock)
        for path in overlay.targets:
            _forget(site / path)
        # The reverse of apply: our package goes last, and of it the pin.
        staging.commit([*(site / path for path in targets), *pycs, *last])
        ours = sorted(overlay.added, key=_lasting)
        staging.take_away({site / path: found.file(path).data for path in ours})
        prune(site / PACKAGE)
        for cache in {(site / path).parent / "__pycache__" for path in overlay.targets}:
            remove_if_empty(cache)


def _lasting(path: str) -> tuple[bool, bool, str]:
    """Sorts our files by how long a revert needs them, the pin last."""
    return (path.endswith(f"/{pins.NAME}"), path.startswith(PROVENANCE + "/"), path)


def _compiled_by_installer(targets: Iterable[str], rows: bytes) -> list[str]:
    def listed(path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return f"\n{folder}/__pycache__/{name[:-3]}.".encode() in rows

    return [path for path in targets if listed(path)]


def _clear(found: Inspection) -> None:
    """Take away what a killed run left, and bytecode that hides its source."""
    site = found.installation.site
    for path in [*found.leftovers, *found.stale]:
        (prune if path == PACKAGE else remove)(site / path)


def _forget(source: Path) -> None:
    """Remove the bytecode of ``source``, of every tag; nothing if it is no module."""
    for pyc in bytecode.cached(source) if source.suffix == ".py" else []:
        remove(pyc)


@contextmanager
def _staging() -> Iterator[Staging]:
    """A staging whose failures say how far they came."""
    with Staging() as staging:
        try:
            yield staging
        except OSError as error:
            if isinstance(error.filename, str):  # A person knows the file, not the staged one.
                error.filename = error.filename.replace(STAGED, "")
            written = _CARRY_ON if staging.begun else "nothing was written"
            raise denied(error, written) from None
