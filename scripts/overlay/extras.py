"""User's own patches, which ``apply`` adds after the series."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

from overlay.errors import OverlayError, usage
from overlay.patches import SERIES, Patch, Series, header_fields
from overlay.source import EXTRA, Overlay

#: Header fields that a user's patch must fill in.
FIELDS = ("Description", "How", "Bug", "Origin", "Forwarded", "Drop-When")

#: Advice for a directory of patches that is none, or that does not fit.
AGAIN = (
    "make each patch again for this overlay (`make edit`, `git apply` in build/edit), and list "
    "it once in `series`"
)


def load(directory: Path, overlay: Overlay) -> list[Patch]:
    """Read ``directory/series`` and the patches that it lists; their names get :data:`EXTRA`.

    Raises:
        OverlayError: no patch is listed, a patch cannot be read, its header lacks a field, or it
            changes a file that ``overlay`` does not.
    """
    directory = directory.absolute()
    try:
        patches = Series.load(directory).patches
    except OverlayError as error:
        raise usage(error.reason, AGAIN, directory / (error.subject or "")) from None
    if not patches:
        listing = directory / SERIES
        raise usage("lists no patch", "list the patches to apply, or omit --extra=", listing)
    for patch in patches:
        _require_provenance(patch, directory / patch.name, overlay)
    return [replace(patch, name=EXTRA + patch.name) for patch in patches]


def _require_provenance(patch: Patch, file: Path, overlay: Overlay) -> None:
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


def described(overlay: Overlay) -> list[dict[str, str]]:
    """Return the name and the one-line origin of each of the user's patches."""
    return [
        {
            "name": patch.name.removeprefix(EXTRA),
            "origin": " ".join(header_fields(patch.header).get("Origin", "").split()),
        }
        for patch in overlay.extra
    ]
