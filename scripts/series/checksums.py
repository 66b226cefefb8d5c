"""The checksums that VERSION_PIN ought to hold for a checkout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from overlay import pin as pins
from overlay.errors import damaged
from overlay.patches import SERIES, Series
from overlay.pin import PACKAGE, sha256
from overlay.source import PROVENANCE

_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def overlay_version(root: Path) -> str:
    """The overlay's version, as the readiness package states it.

    Raises:
        OverlayError: the package does not state one.
    """
    module = root / "vendor_overlay" / PACKAGE / "version.py"
    match = _VERSION.search(module.read_text())
    if not match:
        raise damaged('does not say __version__ = "…"', module)
    return match[1]


def expected_pin(
    root: Path,
    pin: pins.Pin,
    series: Series,
    upstream: Callable[[str], bytes] | None,
    files: Mapping[str, bytes] | None = None,
) -> pins.Pin:
    """Compute the pin that the checkout in ``root`` ought to have, from its modules and patches.

    Release and archives are those of the present ``pin``. ``upstream`` returns upstream's bytes of
    a path; without it the checksums of the patched files stay as well. ``files`` has the files of
    ``patches/`` by path, by default those in ``root``.

    Raises:
        OverlayError: a patch does not apply, or a file has a name that the pin cannot hold.
    """
    if upstream is None:
        before = dict(pin.upstream)
        after = {path: pin.result[path] for path in before}
    else:
        originals = {path: upstream(path) for path in sorted(series.paths())}
        before = {path: sha256(data) for path, data in originals.items()}
        after = {path: sha256(series.apply(path, data)) for path, data in originals.items()}
    tree = root / "vendor_overlay"
    for file in sorted((tree / PACKAGE).rglob("*")):
        name = file.relative_to(tree).as_posix()
        if not file.is_file() or "__pycache__" in file.parts or file.name[0] == "." or "~" in name:
            continue  # An editor's own files are not part of the overlay.
        if not pins.is_safe(name) or " " in name:
            raise damaged("has a name that VERSION_PIN cannot hold; rename it", file)
        after[name] = sha256(file.read_bytes())
    for name in (SERIES, *(patch.name for patch in series.patches)):
        path = f"patches/{name}"
        data = (root / path).read_bytes() if files is None else files[path]
        after[f"{PROVENANCE}/{path}"] = sha256(data)
    return pins.Pin(pin.release, overlay_version(root), pin.archives, before, after)


def patch_digests(pin: pins.Pin) -> dict[str, str]:
    """The checksums of the patch files, by their path in an installation."""
    return {p: d for p, d in pin.result.items() if p.startswith(f"{PROVENANCE}/patches/")}
