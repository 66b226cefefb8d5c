"""Python and torch, as a release's METADATA asks for them. Another may need other builds."""

from __future__ import annotations

from packaging.metadata import Metadata
from packaging.version import Version

PYTHON, TORCH = "Python", "torch"


def asked(metadata: str) -> dict[str, str]:
    """Return the versions of Python and torch that METADATA asks for.

    A torch that is pinned is its number, without a label such as ``+cpu``.
    """
    fields = Metadata.from_email(metadata, validate=False)
    specifiers = [each.specifier for each in fields.requires_dist or [] if each.name == TORCH]
    exact = [each.version for one in specifiers for each in one if each.operator == "=="]
    torch = Version(exact[-1]).public if exact else ", ".join(sorted(map(str, specifiers)))
    return {PYTHON: str(fields.requires_python or "(any)"), TORCH: torch or "(any)"}
