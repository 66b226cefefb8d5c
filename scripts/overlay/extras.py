"""User's own patches, which ``apply`` adds after the series."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from overlay.errors import OverlayError, usage
from overlay.files import STAGED, read
from overlay.patches import SERIES, Patch, header_fields, names_in, parse
from overlay.pin import is_safe
from overlay.source import EXTRA, PROVENANCE, Overlay

#: NAME_MAX of most file systems, in bytes.
LONGEST_NAME = 255

#: Header fields that a user's patch must fill in.
FIELDS = ("Description", "How", "Bug", "Origin", "Forwarded", "Drop-When")


def load(directory: Path, overlay: Overlay) -> list[Patch]:
    """Read ``directory/series`` and the patches that it lists; their names get :data:`EXTRA`.

    ``make import-patch`` writes such a directory.

    Raises:
        OverlayError: no patch is listed, a patch cannot be read, its header lacks a field, or it
            changes a file that ``overlay`` does not.
    """
    listing = directory / SERIES
    try:
        names = names_in(read(listing))
        patches = [_read(directory, name, overlay) for name in names]
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
    return patches


def _read(directory: Path, name: str, overlay: Overlay) -> Patch:
    file, path = directory / name, f"{PROVENANCE}/patches/{EXTRA}{name}"
    longest = LONGEST_NAME - len(STAGED + EXTRA)  # The staged file has a longer name.
    if "/" in name or name.startswith(".") or not is_safe(path) or " " in name:
        longest = 0
    if len(name.encode()) > longest:
        raise usage(
            "has a name that cannot be installed",
            f"give it a name of at most {LONGEST_NAME - len(STAGED + EXTRA)} letters, digits, "
            "dots and hyphens, there and in `series`",
            file,
        )
    try:
        patch = replace(parse(name, read(file)), name=EXTRA + name)
    except OverlayError as error:
        raise misfit(error, file) from None
    fields = header_fields(patch.header)
    for field in FIELDS:
        if not fields.get(field):
            raise usage(
                f"the header's field {field} is empty: provenance cannot be inferred",
                f"fill in {field}, and apply again",
                file,
            )
    for path in sorted(patch.paths - set(overlay.pin.upstream)):
        raise usage(
            f"changes {path}, which the overlay does not: a revert could not verify upstream's "
            "bytes of that file",
            "move this change out of the patch and apply it with `patch -p1`; the overlay ignores "
            "files that it does not change",
            file,
        )
    return patch


def misfit(error: OverlayError, file: Path | None = None) -> OverlayError:
    """Return the error for a user's patch that is no patch, or that does not apply."""
    return usage(
        f"{error.subject}: {error.reason}",
        "import it again for this overlay: make import-patch FILE=some.diff EXTRA=dir",
        file,
    )


def require_python(path: str, data: bytes) -> None:
    """Raise OverlayError, with the reason, if a module does not compile with extra patches."""
    if error := no_python(path, data):
        raise usage(
            f"no longer compiles with the extra patches: {error}",
            "remove the patch that changes it, or import it again for this overlay",
            path,
        )


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


def installed(overlay: Overlay) -> list[Patch]:
    """Return the user's patches in ``overlay``."""
    return [patch for patch in overlay.series.patches if patch.name.startswith(EXTRA)]


def described(overlay: Overlay) -> list[dict[str, str]]:
    """Return the name and the one-line origin of each of the user's patches."""
    return [
        {
            "name": patch.name.removeprefix(EXTRA),
            "origin": " ".join(header_fields(patch.header).get("Origin", "").split()),
        }
        for patch in installed(overlay)
    ]
