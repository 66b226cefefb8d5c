"""A VERSION_PIN in an installation that this version of the overlay cannot prove."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from overlay import pin as pins
from overlay.errors import OverlayError

_FACT = r"(?m)^{} = ([\w.,+-]+)$"


@dataclass(frozen=True)
class Unknown:
    """The version that is laid over an installation, as far as its pin can be read.

    Attributes:
        version: the overlay's, or None if the pin does not say.
        release: the vLLM release that it is for, or None likewise.
        paths: the files that it changes, and whose upstream bytes this version does not know;
            None if the pin is not of the format.
    """

    version: str | None
    release: str | None
    paths: tuple[str, ...] | None

    @classmethod
    def read(cls, data: bytes, known: Container[tuple[str, str]]) -> Unknown:
        """Read a pin that may be damaged, or of a later format.

        Args:
            data: its bytes.
            known: path and SHA-256 of each file of upstream's that this version can prove.
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
