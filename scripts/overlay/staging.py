"""Stage new files beside their targets, and rename them into place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from overlay.errors import Exit, OverlayError
from overlay.files import (
    finish_bytecode,
    holds,
    make_directory,
    remove,
    remove_if_empty,
    sync,
    write,
)
from overlay.traits import Traits, traits

#: The names of staged files and directories begin with this.
STAGED = ".readiness-overlay-"


class Staging:
    """New files and directories beside their targets, until :meth:`commit` renames them.

    At the end of its context it removes files that were staged and not committed.

    Attributes:
        begun: whether something has been renamed into place or removed.
    """

    def __init__(self) -> None:
        self.begun = False
        self._expected: dict[Path, bytes | None] = {}
        self._like: dict[Path, Traits] = {}
        self._staged: dict[Path, Path] = {}
        self._folders: list[Path] = []

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for staged in self._staged.values():
            remove(staged)
        for folder in [] if self.begun else self._folders:
            remove_if_empty(folder)

    def file(self, final: Path, data: bytes, expected: bytes | None) -> None:
        """Stage a file.

        Args:
            final: the file that it will replace; it has the same traits.
            data: the new bytes.
            expected: the bytes that it may replace.

        Raises:
            OSError: as for :func:`~overlay.files.write`.
        """
        self._expected[final] = expected
        self._like[final] = traits(final)
        write(self._stage(final), data, self._like[final])

    def directory(self, final: Path, like: Traits, expected: Mapping[Path, bytes | None]) -> Path:
        """Stage an empty directory for ``final``, for the caller to fill.

        Args:
            final: its path after :meth:`commit`.
            like: its traits.
            expected: the bytes of each file that the directory may replace, None for no file.

        Returns:
            The staged directory.
        """
        self._expected.update(expected)
        staged = self._stage(final)
        make_directory(staged, like)
        return staged

    def ensure_directory(self, path: Path) -> None:
        """Create a directory now, for files to be staged in, if it does not exist."""
        if not path.is_dir():
            make_directory(path, traits(path.parent).permissions)
            self._folders.append(path)

    def adopt_bytecode(self, final: Path, source: Path) -> None:
        """Take over the bytecode of ``source``, which a child compiled to :func:`staged_path`."""
        self._staged[final] = staged_path(final)
        finish_bytecode(self._staged[final], traits(source).permissions)

    def newest(self, final: Path) -> Path:
        """The path of the contents of ``final`` now: staged, or in place."""
        return self._staged.get(final, final)

    def commit(self, finals: Iterable[Path]) -> None:
        """Rename staged files into place, in this order, durably.

        Raises:
            OverlayError: a file that would be replaced has changed since it was inspected.
            OSError: the system refuses.
        """
        for final in finals:
            staged = self._staged[final]
            if staged.is_dir() and os.path.lexists(final):
                self._merge(staged, final)
            else:
                self._replace(staged, final)
                sync(final.parent)
            del self._staged[final]

    def take_away(self, expected: Mapping[Path, bytes | None]) -> None:
        """Remove files, in this order, and then the directories that are empty.

        Args:
            expected: the bytes of each file, or None for no file.

        Raises:
            OverlayError: a file that would be removed has changed since it was inspected.
            OSError: the system refuses.
        """
        folders = set()
        for path, data in expected.items():
            self._expected[path] = data
            self._refuse_change(path)
            self.begun = True
            remove(path)
            folders.add(path.parent)
        for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
            remove(folder / "__pycache__")
            if remove_if_empty(folder):
                sync(folder.parent)

    def _merge(self, staged: Path, final: Path) -> None:
        """Rename each file of one directory into another, and remove the first.

        An existing directory cannot be replaced by a rename: overlayfs refuses that for a
        directory from a lower layer of an image (EXDEV).
        """
        for name in sorted(os.listdir(staged)):
            source, target = staged / name, final / name
            if source.is_dir() and target.is_dir():
                self._merge(source, target)
            else:
                self._replace(source, target)
        sync(final)
        os.rmdir(staged)

    def _replace(self, staged: Path, final: Path) -> None:
        self._refuse_change(final)
        self.begun = True
        os.replace(staged, final)

    def _refuse_change(self, final: Path) -> None:
        """Raise if somebody else has changed a file since it was inspected.

        It is read again right before it is replaced, so that only the time between two
        system calls is left to chance.
        """
        if final not in self._expected or (
            (final not in self._like or (final.exists() and self._like[final] == traits(final)))
            and holds(final, self._expected[final])
        ):
            return
        written = "other files are changed already" if self.begun else "nothing was written"
        raise OverlayError(
            Exit.FOREIGN,
            f"was changed by somebody else during this run, and is left as it is; {written}",
            subject=final,
            next_step="make sure that nobody else changes files there; `status` shows the state",
        )

    def _stage(self, final: Path) -> Path:
        staged = self._staged[final] = staged_path(final)
        return staged


def staged_path(final: Path) -> Path:
    """The path at which the new contents of ``final`` are staged."""
    return final.with_name(STAGED + final.name)
