"""User's own patches, which ``apply`` adds after the series."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from overlay.errors import OverlayError, damaged, usage
from overlay.files import COMING, read
from overlay.patches import SERIES, Patch, header_fields, names_in, parse
from overlay.pin import is_safe
from overlay.source import EXTRA, PROVENANCE, Overlay

#: NAME_MAX of most file systems, in bytes.
LONGEST_NAME = 255

#: Header fields that a user's patch must fill in.
FIELDS = ("Description", "How", "Bug", "Origin", "Forwarded", "Drop-When")


@dataclass(frozen=True)
class Extra:
    """User's patch, whose name begins with :data:`~overlay.source.EXTRA`, and its bytes."""

    patch: Patch
    data: bytes

    @property
    def paths(self) -> set[str]:
        """Files that the patch changes."""
        return {file.path for file in self.patch.files}


def load(directory: Path, overlay: Overlay) -> list[Extra]:
    """Read ``directory/series`` and the patches that it lists.

    ``make import-patch`` writes such a directory.

    Raises:
        OverlayError: no patch is listed, a patch cannot be read, its header lacks a field, or it
            changes a file that ``overlay`` does not.
    """
    listing = directory / SERIES
    try:
        names = names_in(read(listing))
        extras = [_read(directory, name) for name in names]
    except OSError as error:
        raise usage(
            f"cannot be read ({error.strerror})",
            "name a directory that `make import-patch` has written",
            error.filename or listing,
        ) from None
    except OverlayError as error:
        if error.subject != SERIES:
            raise
        raise usage(error.reason, "list each patch once", listing) from None
    if not names:
        raise usage("lists no patch", "list the patches to apply, or omit --extra=", listing)
    for extra, name in zip(extras, names, strict=True):
        _check(extra, directory / name, overlay)
    return extras


def _read(directory: Path, name: str) -> Extra:
    file, path = directory / name, f"{PROVENANCE}/patches/{EXTRA}{name}"
    staged = len(os.fsencode(COMING + EXTRA))  # The staged file has a longer name.
    if (
        "/" in name
        or name.startswith(".")
        or not is_safe(path)
        or " " in name
        or staged + len(name.encode()) > LONGEST_NAME
    ):
        raise usage(
            "has a name that cannot be installed",
            f"give it a name of at most {LONGEST_NAME - staged} letters, digits, dots and hyphens, "
            "there and in `series`",
            file,
        )
    data = read(file)
    try:
        return Extra(replace(parse(name, data), name=EXTRA + name), data)
    except OverlayError as error:
        raise _wrong(file, error) from None


def _check(extra: Extra, file: Path, overlay: Overlay) -> None:
    fields = header_fields(extra.patch.header)
    for name in FIELDS:
        if not fields.get(name):
            raise usage(
                f"the header's field {name} is empty: provenance cannot be inferred",
                f"fill in {name}, and apply again",
                file,
            )
    for path in sorted(extra.paths - set(overlay.pin.upstream)):
        raise usage(
            f"changes {path}, which the overlay does not: a revert could not verify upstream's "
            "bytes of that file",
            "move this change out of the patch and apply it with `patch -p1`; the overlay ignores "
            "files that it does not change",
            file,
        )


def require_python(path: str, before: bytes, after: bytes) -> None:
    """Raise OverlayError, with the line, if a change stops a module from compiling."""
    # A module that did not compile before may use the syntax of a newer Python.
    if (error := no_python(path, after)) and no_python(path, before) is None:
        raise damaged(f"no longer compiles with the patch: {error}", path)


def no_python(path: str, data: bytes) -> str | None:
    """Return the reason why a module does not compile, or None. The module is not run.

    ``ast.parse`` would accept more, such as a ``return`` outside a function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return str(error) or type(error).__name__
    return None


def misfit(extra: Extra, error: OverlayError) -> OverlayError:
    """Return the error for a patch that does not apply, or stops a module from compiling."""
    return _wrong(extra.patch.name.removeprefix(EXTRA), error)


def _wrong(file: str | Path, error: OverlayError) -> OverlayError:
    return usage(
        error.reason if error.subject is None else f"{error.subject}: {error.reason}",
        "import it again for this overlay: make import-patch FILE=some.diff EXTRA=dir",
        file,
    )


def installed(overlay: Overlay) -> list[Extra]:
    """Return the user's patches in ``overlay``, read from an installation's provenance.

    Raises:
        OverlayError: a patch is missing, or its checksum is missing or wrong.
    """
    extras = []
    for patch in overlay.series.patches:
        if patch.name.startswith(EXTRA):
            path = f"{PROVENANCE}/patches/{patch.name}"
            if path not in overlay.pin.result:
                raise damaged(f"does not list {path}", overlay.root)
            extras.append(Extra(patch, overlay.added_bytes(path)))
    return extras


def described(overlay: Overlay) -> list[dict[str, str]]:
    """Return the name and the one-line origin of each of the user's patches."""
    return [
        {
            "name": patch.name.removeprefix(EXTRA),
            "origin": " ".join(header_fields(patch.header).get("Origin", "").split()),
        }
        for patch in overlay.series.patches
        if patch.name.startswith(EXTRA)
    ]
