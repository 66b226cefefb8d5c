"""Patches of the user's own, which ``apply`` lays behind the series."""

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

#: How long a file's name may be, in bytes, on almost every file system.
LONGEST_NAME = 255

#: The header's fields that must say something. Only who takes a patch over can fill them in.
FIELDS = ("Description", "How", "Bug", "Origin", "Forwarded", "Drop-When")


@dataclass(frozen=True)
class Extra:
    """A patch that is not the overlay's own.

    Attributes:
        patch: its ``name`` begins with :data:`~overlay.source.EXTRA`.
        data: the bytes of its file.
    """

    patch: Patch
    data: bytes

    @property
    def paths(self) -> set[str]:
        """The files that it changes."""
        return {file.path for file in self.patch.files}


def load(directory: Path, overlay: Overlay) -> list[Extra]:
    """Read ``directory/series`` and the patches that it lists.

    Args:
        directory: as ``make import-patch`` writes it.
        overlay: the whole overlay, whose files alone may be changed.

    Raises:
        OverlayError: a patch cannot be read, its header does not say where it is from, or it
            changes a file that it may not.
    """
    listing = directory / SERIES
    try:
        names = names_in(read(listing))
        extras = [_read(directory, name) for name in names]
    except OSError as error:
        raise usage(
            f"cannot be read ({error.strerror})",
            "name a directory of patches and their `series`, as `make import-patch` writes it",
            error.filename or listing,
        ) from None
    except OverlayError as error:
        if error.subject != SERIES:
            raise
        raise usage(error.reason, "list each patch once", listing) from None
    if not names:
        raise usage("lists no patch", "list those to lay, or leave EXTRA (--extra) out", listing)
    for extra, name in zip(extras, names, strict=True):
        _check(extra, directory / name, overlay)
    return extras


def _read(directory: Path, name: str) -> Extra:
    file, path = directory / name, f"{PROVENANCE}/patches/{EXTRA}{name}"
    staged = len(os.fsencode(COMING + EXTRA))  # It has a longer name on its way there.
    if (
        "/" in name
        or name.startswith(".")
        or not is_safe(path)
        or " " in name
        or staged + len(name.encode()) > LONGEST_NAME
    ):
        raise usage(
            "has a name that an installation cannot hold",
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
                f"the header's field {name} is empty: provenance is yours to state",
                f"fill in {name}, and apply again",
                file,
            )
    for path in sorted(extra.paths - set(overlay.pin.upstream)):
        raise usage(
            f"changes {path}, which the overlay does not: nothing on this machine could prove "
            "upstream's bytes of it when the patch is taken off",
            "take that file out of the patch and lay it with `patch -p1`; files that the overlay "
            "does not change are none of its business",
            file,
        )


def require_python(path: str, before: bytes, after: bytes) -> None:
    """Raise if a change makes a module one that no longer compiles.

    Raises:
        OverlayError: naming the line.
    """
    # Otherwise it may be the syntax of a newer Python that this one does not know.
    if (error := no_python(path, after)) and no_python(path, before) is None:
        raise damaged(f"is no longer Python with it: {error}", path)


def no_python(path: str, data: bytes) -> str | None:
    """Why a module does not compile, if it does not. It is not run, and nothing is written.

    A parser alone accepts more, such as a ``return`` that is in no function.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(data, path, "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return str(error) or type(error).__name__
    return None


def misfit(extra: Extra, error: OverlayError) -> OverlayError:
    """The error for a patch that does not apply where it claims to."""
    return _wrong(extra.patch.name.removeprefix(EXTRA), error)


def _wrong(file: str | Path, error: OverlayError) -> OverlayError:
    return usage(
        error.reason if error.subject is None else f"{error.subject}: {error.reason}",
        "make it anew for this overlay: make import-patch FILE=some.diff EXTRA=dir",
        file,
    )


def installed(overlay: Overlay) -> list[Extra]:
    """Those of an installation, by its provenance.

    Args:
        overlay: read from the provenance.

    Raises:
        OverlayError: a patch cannot be read any more.
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
    """The name of each in the user's directory, and its origin, on one line."""
    return [
        {
            "name": patch.name.removeprefix(EXTRA),
            "origin": " ".join(header_fields(patch.header).get("Origin", "").split()),
        }
        for patch in overlay.series.patches
        if patch.name.startswith(EXTRA)
    ]
