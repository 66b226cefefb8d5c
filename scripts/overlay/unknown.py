"""Installed VERSION_PIN that this version of the overlay cannot verify."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from overlay import pin as pins
from overlay.errors import OverlayError

_FACT = r"(?m)^{} = ([\w.,+-]+)$"


@dataclass(frozen=True)
class Unknown:
    """Installed version of the overlay, as far as its pin is readable.

    ``paths`` are its changed files without known upstream checksums; None for a malformed pin.
    """

    version: str | None
    release: str | None
    paths: tuple[str, ...] | None

    @classmethod
    def read(cls, data: bytes, known: Container[tuple[str, str]]) -> Unknown:
        """Read a pin that may be damaged or of a later format.

        ``known`` holds path and SHA-256 of the upstream files that this version can verify.
        """
        text = data.decode(errors="replace")
        try:
            pin = pins.loads(text)
        except OverlayError:
            facts = (re.search(_FACT.format(key), text) for key in ("overlay", "vllm"))
            version, release = (fact and fact[1] for fact in facts)
            return cls(version, release, None)
        paths = (path for path, digest in pin.upstream.items() if (path, digest) not in known)
        return cls(pin.overlay, pin.release, tuple(sorted(paths)))
