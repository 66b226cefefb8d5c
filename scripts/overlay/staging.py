"""Stage new files next to their targets, and rename them into place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from overlay.bytecode import compile_modules
from overlay.errors import Exit, OverlayError, denied
from overlay.files import (
    STAGED,
    Traits,
    finish_bytecode,
    holds,
    make_directory,
    remove,
    remove_if_empty,
    staged_in,
    staged_path,
    sync,
    traits,
    write,
)

_CARRY_ON = "the installation is partial: the same command completes it, `revert` undoes it"


class Staging:
    """Staged files next to their targets, until :meth:`commit` renames them.

    Uncommitted files are removed at the end of the context, and an OSError becomes an OverlayError.
    ``begun`` is set once a file has been renamed into place or removed.
    """

    def __init__(self) -> None:
        self.begun = False
        self._expected: dict[Path, bytes | None] = {}
        self._folders: set[Path] = set()
        self._new_folders: list[Path] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for folder in self._folders:
            for staged in staged_in(folder):
                remove(staged)
        for folder in [] if self.begun else reversed(self._new_folders):
            remove_if_empty(folder)
        if isinstance(error, OSError):
            if isinstance(error.filename, str):  # Name the final file.
                error.filename = error.filename.replace(STAGED, "")
            raise denied(error, _CARRY_ON if self.begun else "nothing was written") from None

    def file(
        self, final: Path, data: bytes, expected: bytes | None, like: Traits | None = None
    ) -> None:
        """Stage a file with the traits ``like``, by default those of the file that it replaces.

        ``expected`` holds the present bytes, which :meth:`commit` checks; None if there must be no
        file. Raises OSError as :func:`~overlay.files.write` does.
        """
        if like is None:
            like = traits(final)
        self._expected[final] = expected
        self._folders.add(final.parent)
        write(staged_path(final), data, like)

    def directory(self, path: Path) -> None:
        """Create a directory, and its parents, unless it exists."""
        if not path.is_dir():
            self.directory(path.parent)
            self._folders.add(path.parent)
            staged = staged_path(path)
            make_directory(staged, traits(path.parent).permissions)
            os.rename(staged, path)
            self._new_folders.append(path)
            sync(path.parent)

    def bytecode(self, sources: Iterable[Path], interpreter: Path | None, lock: int) -> list[Path]:
        """Compile modules, and stage their bytecode with the permissions of its source.

        ``sources`` are final paths; those of other files are left out, and without an interpreter
        all are. The other arguments, the result and the errors are those of
        :func:`~overlay.bytecode.compile_modules`.
        """
        modules = [path for path in sources if path.suffix == ".py"] if interpreter else []
        newest = {path: staged_path(path) if path in self._expected else path for path in modules}
        for path in newest:
            self.directory(path.parent / "__pycache__")
            self._folders.add(path.parent / "__pycache__")
        finals = compile_modules(interpreter, newest, lock) if interpreter and newest else []
        for final, source in zip(finals, newest.values(), strict=True):
            finish_bytecode(staged_path(final), traits(source).permissions)
        return finals

    def commit(self, finals: Iterable[Path]) -> None:
        """Rename staged files into place, in order, and sync the directories.

        Raises:
            OverlayError: a file to replace has changed since its inspection.
            OSError: a system call failed.
        """
        folders = set()
        for final in finals:
            self._refuse_change(final)
            self.begun = True
            os.replace(staged_path(final), final)
            folders.add(final.parent)
        for folder in sorted(folders):
            sync(folder)

    def take_away(self, expected: Mapping[Path, bytes | None]) -> None:
        """Remove files, in order; ``expected`` maps each to its bytes, or None for no file.

        Raises:
            OverlayError: a file to remove has changed since its inspection.
            OSError: a system call failed.
        """
        self._expected.update(expected)
        for path in expected:
            self._refuse_change(path)
            self.begun = True
            remove(path)

    def _refuse_change(self, final: Path) -> None:
        """Raise OverlayError if a file has changed since its inspection.

        The file is read right before its replacement: only a change between these two system calls
        is missed.
        """
        if final not in self._expected or holds(final, self._expected[final]):
            return
        written = "other files were changed already" if self.begun else "nothing was written"
        raise OverlayError(
            Exit.FOREIGN,
            f"was changed by another program during this run, and was not touched; {written}",
            subject=final,
            next_step="stop the other program; `status` shows the state",
        )
