"""The overlay as a set of files, from a checkout or from an installation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlay import pin as pins
from overlay.errors import OverlayError, damaged
from overlay.files import read
from overlay.patches import Series
from overlay.pin import PACKAGE, Pin, sha256

#: Where an installation keeps the pin and the patches that it was overlaid with.
PROVENANCE = f"{PACKAGE}/provenance"

#: In a comment at the top of each file that some version of the overlay has changed.
MARK = b"vllm-readiness-overlay"

#: Begins the name of each patch there that is not the overlay's own.
EXTRA = "extra-"


@dataclass(frozen=True)
class Overlay:
    """A pin, a series, and the files that are added.

    It is read from a checkout or an unpacked archive (:meth:`load`), or from the
    provenance that ``apply`` leaves in an installation (:meth:`installed`). The
    latter suffices for any version of the overlay to revert.

    Attributes:
        root: the directory that it was read from.
        pin: its pin.
        pin_bytes: the bytes of its pin.
        series: its patches.
        files: bytes of added files that are not those in ``root``, by path.
        base: the whole overlay, of one that was derived from it (:mod:`overlay.parts`).
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
            OverlayError: VERSION_PIN or a patch is missing, malformed or at odds
                with the other.
        """
        overlay = cls.unproven(root)
        if difference := overlay.series.paths() ^ set(overlay.pin.upstream):
            raise damaged(
                f"the patches and VERSION_PIN disagree on {', '.join(sorted(difference))}", root
            )
        return overlay

    @classmethod
    def unproven(cls, root: Path) -> Overlay:
        """Read the overlay in ``root``, even if its patches are ahead of its checksums.

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
        """The overlay whose provenance is in an installation, or None if there is none.

        A revert that was cut off may have removed the patches already, and does not need
        them again; then the series is empty.

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
        """Upstream's files that are changed, sorted."""
        return sorted(self.pin.upstream)

    @property
    def added(self) -> list[str]:
        """Files that are added, sorted; the pin itself is one of them."""
        return sorted([*self.pin.added, f"{PROVENANCE}/{pins.NAME}"])

    @property
    def extra(self) -> list[str]:
        """The names of the patches that are not the overlay's own, as their user named them."""
        names = [patch.name for patch in self.series.patches]
        return [name.removeprefix(EXTRA) for name in names if name.startswith(EXTRA)]

    @property
    def selection(self) -> str:
        """What of the overlay is not as it comes: a phrase to follow its version, or nothing."""
        without = [f"without {', '.join(self.pin.without)}"] if self.pin.without else []
        extra = [f"with the extra patches {', '.join(self.extra)}"] if self.extra else []
        return "".join(f" {phrase}" for phrase in (*without, *extra))

    def digest_of(self, path: str) -> str:
        """The SHA-256 that ``path`` has in an overlaid installation."""
        if path == f"{PROVENANCE}/{pins.NAME}":
            return sha256(self.pin_bytes)
        return self.pin.result[path]

    def origin_of(self, path: str) -> Path:
        """The path of an added file in this copy of the overlay."""
        copied = path.removeprefix(PROVENANCE + "/")
        return self.root / (copied if copied != path else f"vendor_overlay/{path}")

    def added_bytes(self, path: str) -> bytes:
        """The bytes of an added file, proven by checksum.

        Raises:
            OverlayError: the file is missing, or not the one that is pinned.
        """
        origin = self.origin_of(path)
        if path in self.files:
            return _proven(self.files[path], self.digest_of(path), origin)
        try:
            data = read(origin)
        except OSError as error:
            raise damaged(f"cannot be read ({error.strerror})", origin) from None
        return _proven(data, self.digest_of(path), origin)

    def overlaid_bytes(self, path: str, pristine: bytes) -> bytes:
        """Upstream's ``pristine`` bytes of ``path`` with the series on, proven by checksum.

        A vendored copy in the tree, as an archive has it, is used if its checksum is the
        pinned one; otherwise the patches are applied.

        Raises:
            OverlayError: the result is not the pinned one.
        """
        vendored = self.root / "vendor_overlay" / path
        if vendored.is_file():
            data = read(vendored)
            if sha256(data) == self.pin.result[path]:
                return data
        return _proven(self.series.apply(path, pristine), self.pin.result[path], path)

    def pristine_bytes(self, path: str, overlaid: bytes) -> bytes:
        """Upstream's bytes of ``path``, from the ``overlaid`` ones, proven by checksum.

        Raises:
            OverlayError: the result is not what upstream released.
        """
        return _proven(self.series.reverse(path, overlaid), self.pin.upstream[path], path)


def _proven(data: bytes, digest: str, origin: str | Path) -> bytes:
    if sha256(data) != digest:
        raise damaged(
            f"has SHA-256 {sha256(data)}, but VERSION_PIN expects {digest}; nothing was written",
            origin,
        )
    return data
