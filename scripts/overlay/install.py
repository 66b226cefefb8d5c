"""Write the overlay's files into an installation, and restore upstream's."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from overlay import bytecode, record
from overlay.errors import Exit, OverlayError, denied
from overlay.files import prune, remove, remove_if_empty, sync, traits
from overlay.pin import PACKAGE
from overlay.processes import refuse_serving
from overlay.source import PIN, PROVENANCE
from overlay.staging import Staging
from overlay.state import Inspection, State


@contextmanager
def exclusive(site: Path, wait: float) -> Iterator[int]:
    """Hold an flock on the directory ``site`` during the context.

    Yields the directory's file descriptor. A child process that inherits the descriptor also holds
    the lock. The kernel releases the lock once all these processes have ended.

    Raises:
        OverlayError: another run still holds the lock after ``wait`` seconds.

    >>> with exclusive(site, wait=0), exclusive(site, wait=0):
    ...     pass
    Traceback (most recent call last):
    OverlayError: another run holds the lock
    """
    handle = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OverlayError(
                        Exit.BUSY,
                        f"another run holds the lock and did not finish within {wait:g} s",
                        subject=site,
                        next_step="wait for it and run the same command again (--wait SECONDS)",
                    ) from None
                time.sleep(0.02)
        yield handle
    finally:
        os.close(handle)


def refuse_unwritable(inspection: Inspection, changed: Iterable[str], force: bool) -> None:
    """Raise OverlayError if a process serves from the installation, or a directory is read-only.

    ``changed`` lists the paths to change. ``force`` skips the check of processes.

    >>> refuse_unwritable(inspect(vllm, small), small.targets, force=True)
    """
    if not force:
        refuse_serving(inspection.installation)
    site, record_file = inspection.installation.site, inspection.installation.record
    folders = {(site / path).parent for path in (*changed, *inspection.overlay.added)}
    folders |= {(site / PACKAGE).parent} | ({record_file.parent} if record_file else set())
    for path in sorted(folders):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            read_only = os.statvfs(path).f_flag & os.ST_RDONLY
            number = errno.EROFS if read_only else errno.EACCES
            raise denied(OSError(number, os.strerror(number), str(path)), "nothing was written")


def lay_over(inspection: Inspection, lock: int) -> None:
    """Apply the overlay: stage every file that is not overlaid, and rename it into place.

    >>> with exclusive(vllm.site, wait=0) as lock:
    ...     lay_over(inspect(vllm, small), lock)
    >>> inspect(vllm, small).state
    <State.OVERLAID: 'overlaid'>
    """
    overlay, site = inspection.overlay, inspection.installation.site
    with Staging() as staging:
        _clear(inspection)
        groups = _stage_ours(inspection, staging, lock)
        _forget(site, [*overlay.targets, *overlay.added])
        for group in groups:
            staging.commit(group)


def take_off(inspection: Inspection, lock: int) -> None:
    """Revert the overlay: stage upstream's files, rename them into place, and remove ours.

    >>> with exclusive(vllm.site, wait=0) as lock:
    ...     lay_over(inspect(vllm, small), lock)
    ...     take_off(inspect(vllm, small), lock)
    >>> inspect(vllm, small).state
    <State.PRISTINE: 'pristine'>
    """
    overlay, site = inspection.overlay, inspection.installation.site
    with Staging() as staging:
        _clear(inspection)
        groups = _stage_upstreams(inspection, staging, lock)
        _forget(site, overlay.targets)
        # In the reverse order of apply, our files are removed last, and the pin after all others.
        # Until then an interrupted run leaves the installation partial.
        for group in groups:
            staging.commit(group)
        for folder in sorted({(site / path).parent for path in overlay.targets}):
            remove_if_empty(folder / "__pycache__")
            sync(folder)
        ours = sorted(overlay.added, key=_lasting)
        staging.take_away({site / path: inspection.file(path).data for path in ours})
        prune(site / PACKAGE)
        sync((site / PACKAGE).parent)


def produce(inspection: Inspection) -> dict[str, bytes]:
    r"""Return the overlay's files by path, without foreign ones; write nothing.

    Raises:
        OverlayError: a file differs from its pin.

    >>> produce(inspect(vllm, small))["vllm/one.py"]
    b'# changed\nA = 1\nC = 33\n'
    """
    overlay = inspection.overlay
    known = {f.path for f in inspection.files if f.state in (State.PRISTINE, State.OVERLAID)}
    files = {path: inspection.overlaid(path) for path in overlay.targets if path in known}
    return files | {path: overlay.added_bytes(path) for path in overlay.added}


def _stage_ours(inspection: Inspection, staging: Staging, lock: int) -> list[list[Path]]:
    """Stage the overlay; return the groups of files to commit, in order."""
    overlay, site = inspection.overlay, inspection.installation.site
    lacking = {file.path for file in inspection.files if file.state is not State.OVERLAID}
    targets = [path for path in overlay.targets if path in lacking]
    pin, *ours = sorted(overlay.added, key=_lasting, reverse=True)
    new = produce(inspection)
    for path in targets:
        staging.file(site / path, new[path], inspection.file(path).data)
    permissions = traits(site / overlay.targets[0]).permissions
    for path in [path for path in (pin, *ours) if path in lacking]:
        staging.directory((site / path).parent)
        staging.file(site / path, new[path], None, permissions)
    modules = [site / path for path in (*overlay.targets, *overlay.added)]
    pycs = staging.bytecode(modules, inspection.installation.interpreter, lock)
    last = []
    if file := inspection.installation.record:
        last = [file]
        compiled = sorted(os.path.relpath(pyc, site) for pyc in pycs)
        rows = [record.row(path, new[path]) for path in overlay.added]
        rows += [f"{path},,".encode() for path in compiled if path.startswith(f"{PACKAGE}/")]
        data = record.overlay(inspection.record_bytes, inspection.changed_rows, rows)
        staging.file(file, data, inspection.record_bytes)
    # The pin and the patches come first, then the modules: no seam may exist without the module
    # that it calls, and no file without the provenance that reverts it.
    groups = [[site / path for path in group if path in lacking] for group in ([pin], ours)]
    return [*groups, last, [*(site / path for path in targets), *pycs]]


def _stage_upstreams(inspection: Inspection, staging: Staging, lock: int) -> list[list[Path]]:
    """Stage upstream's files; return the groups of files to commit, in order."""
    overlay, site = inspection.overlay, inspection.installation.site
    targets = [path for path in overlay.targets if inspection.file(path).state is State.OVERLAID]
    old = {path: inspection.pristine(path) for path in targets}
    for path in targets:
        staging.file(site / path, old[path], inspection.file(path).data)
    pycs, last = [], []
    if file := inspection.installation.record:
        last = [file]
        data = record.restore(inspection.record_bytes, inspection.changed_rows)
        staging.file(file, data, inspection.record_bytes)
        # Compile only the modules whose bytecode RECORD lists: the installer compiled them.
        modules = [
            path
            for path in (site / target for target in overlay.targets)
            if f"\n{path.parent.relative_to(site)}/__pycache__/{path.stem}.".encode() in data
        ]
        pycs = staging.bytecode(modules, inspection.installation.interpreter, lock)
    return [[*(site / path for path in targets), *pycs], last]


def _lasting(path: str) -> tuple[bool, bool, str]:
    """Return the sort key of our files in a revert: modules, then patches, then the pin."""
    return (path == PIN, path.startswith(PROVENANCE + "/"), path)


def _clear(inspection: Inspection) -> None:
    """Remove leftovers of a killed run; :func:`_forget` removes stale bytecode, too."""
    site = inspection.installation.site
    for path in inspection.leftovers:
        (prune if path == PACKAGE else remove)(site / path)


def _forget(site: Path, paths: Iterable[str]) -> None:
    """Remove the bytecode of the modules among ``paths``, for all interpreters."""
    for path in paths:
        for pyc in bytecode.cached(site / path) if path.endswith(".py") else []:
            remove(pyc)
