"""Overlay as a set of files, read from a checkout or an installation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlay import pin as pins
from overlay.errors import OverlayError, damaged
from overlay.files import read
from overlay.patches import Patch, Series
from overlay.pin import PACKAGE, Pin, sha256

#: The directory of the pin and the patches in an installation.
PROVENANCE = f"{PACKAGE}/provenance"
#: Path of the pin in an installation.
PIN = f"{PROVENANCE}/{pins.NAME}"

#: Text of a comment at the top of each changed file, in every version of the overlay.
MARK = b"vllm-readiness-overlay"

#: Prefix of the names of the user's own patches in the provenance.
EXTRA = "extra-"


@dataclass(frozen=True)
class Overlay:
    """Overlay: a pin, a series, and the added files.

    Read from a checkout or an unpacked archive (:meth:`load`), or from the provenance in an
    installation (:meth:`installed`). The provenance suffices for a revert by another version of
    the tool.

    Attributes:
        root: the directory that it was read from.
        pin: the parsed VERSION_PIN.
        pin_bytes: the bytes of VERSION_PIN.
        series: the patches.
        files: path to bytes of added files that are not read from ``root``.
        base: the whole overlay, if this is a part of it (:mod:`overlay.parts`).
    """

    root: Path
    pin: Pin
    pin_bytes: bytes
    series: Series
    files: Mapping[str, bytes] = field(default_factory=dict)
    base: Overlay | None = None

    @classmethod
    def load(cls, root: Path) -> Overlay:
        """Read the overlay in ``root``.

        Raises:
            OverlayError: VERSION_PIN or a patch is missing, malformed or inconsistent.
        """
        overlay = cls.unproven(root)
        if difference := overlay.series.paths() ^ set(overlay.pin.upstream):
            raise damaged(
                f"the patches and VERSION_PIN disagree on {', '.join(sorted(difference))}", root
            )
        return overlay

    @classmethod
    def unproven(cls, root: Path) -> Overlay:
        """Read the overlay in ``root``, even if its checksums are stale.

        Raises:
            OverlayError: VERSION_PIN or a patch is missing or malformed.
        """
        origin = root / pins.NAME
        try:
            data = read(origin)
            text = data.decode()
        except OSError as error:
            raise damaged(f"cannot be read ({error.strerror})", origin) from None
        except UnicodeDecodeError as error:
            raise damaged(f"is not UTF-8: {error}", origin) from None
        return cls(root, pins.loads(text, str(origin)), data, Series.load(root / "patches"))

    @classmethod
    def installed(cls, site: Path) -> Overlay | None:
        """Read the overlay from an installation's provenance; None without one.

        The series is empty if the patches are unreadable. An interrupted revert may leave such a
        provenance, because it no longer needs the patches.

        Raises:
            OverlayError: the pin in the provenance is malformed.
        """
        root = site / PROVENANCE
        try:
            return cls.load(root)
        except OverlayError:
            try:
                data = read(root / pins.NAME)
            except OSError:
                return None
            return cls(root, pins.loads(data.decode(errors="replace")), data, Series([]))

    @property
    def targets(self) -> list[str]:
        """Files of upstream that the overlay changes, sorted."""
        return sorted(self.pin.upstream)

    @property
    def added(self) -> list[str]:
        """Files that the overlay adds, including the pin, sorted."""
        return sorted([*self.pin.added, PIN])

    @property
    def extra(self) -> list[Patch]:
        """User's own patches."""
        return [patch for patch in self.series.patches if patch.name.startswith(EXTRA)]

    @property
    def selection(self) -> str:
        """Version suffix naming omissions and extra patches; empty by default."""
        without = [f"without {', '.join(self.pin.without)}"] if self.pin.without else []
        names = ", ".join(patch.name.removeprefix(EXTRA) for patch in self.extra)
        extra = [f"with the extra patches {names}"] if names else []
        return "".join(f" {phrase}" for phrase in (*without, *extra))

    def digest_of(self, path: str) -> str:
        """Return the SHA-256 of ``path`` in an overlaid installation."""
        return sha256(self.pin_bytes) if path == PIN else self.pin.result[path]

    @property
    def digest(self) -> str:
        """Digest of an installation that has exactly this overlay."""
        paths = sorted([*self.targets, *self.added])
        return pins.digest_of((path, self.digest_of(path)) for path in paths)

    def origin_of(self, path: str) -> Path:
        """Return the path of an added file in this copy of the overlay."""
        copied = path.removeprefix(PROVENANCE + "/")
        return self.root / (copied if copied != path else f"vendor_overlay/{path}")

    def added_bytes(self, path: str) -> bytes:
        """Read an added file; OverlayError if it is missing or fails its checksum."""
        origin = self.origin_of(path)
        try:
            data = self.files[path] if path in self.files else read(origin)
        except OSError as error:
            raise damaged(f"cannot be read ({error.strerror})", origin) from None
        return _proven(data, self.digest_of(path), origin)

    def overlaid_bytes(self, path: str, pristine: bytes) -> bytes:
        """Apply the series to the ``pristine`` bytes of ``path``.

        Raises:
            OverlayError: the checksum differs from the pin.
        """
        return _proven(self.series.apply(path, pristine), self.pin.result[path], path)

    def pristine_bytes(self, path: str, overlaid: bytes) -> bytes:
        """Restore upstream's bytes of ``path``; OverlayError if the checksum differs."""
        return _proven(self.series.reverse(path, overlaid), self.pin.upstream[path], path)


def _proven(data: bytes, digest: str, origin: str | Path) -> bytes:
    if sha256(data) != digest:
        raise damaged(
            f"has SHA-256 {sha256(data)}, but VERSION_PIN expects {digest}; nothing was written",
            origin,
        )
    return data
