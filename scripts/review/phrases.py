"""Phrases that the page and the Markdown have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

#: The contents of review.json, or a part of them.
Review = Mapping[str, Any]

_VERDICTS = {
    "clean": "Clean: nothing here needs a decision.",
    "needs eyes": "Needs eyes: everything merges, and something below must be looked at first.",
    "conflicts": "Conflicts: something does not merge, and needs its author.",
}
_PATCHES = {
    "applies": ("applies as it is", "apply as they are"),
    "moved": ("applies moved", "apply moved"),
    "conflicts": ("conflicts", "conflict"),
    "obsolete": ("is obsolete", "are obsolete"),
}
#: The fates of a name.
FATES = {
    "same": "same",
    "signature": "signature changed",
    "body": "body changed",
    "moved": "moved",
    "gone": "gone",
}


def title(review: Review) -> str:
    """The subject of the review."""
    base = review["base"]
    if review["own"]:
        return f"Overlay {base['overlay']} on vLLM {base['release']}"
    return f"vLLM {review['release']['version']} for overlay {base['overlay']}"


def verdict(review: Review) -> str:
    """The verdict on the release, with its meaning, in one sentence."""
    return _VERDICTS.get(review["verdict"], str(review["verdict"]))


def counted(number: int, singular: str, plural: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def patches(review: Review) -> str:
    """The number of patches with each verdict."""
    verdicts = Counter(patch["verdict"] for patch in review["patches"])
    parts = []
    for name in (*_PATCHES, *(verdicts.keys() - _PATCHES.keys())):
        if number := verdicts[name]:
            singular, plural = _PATCHES.get(name, (name, name))
            parts.append(counted(number, f"patch {singular}", f"patches {plural}"))
    return ", ".join(parts) + "." if parts else "There are no patches."


def changed(review: Review) -> list[Review]:
    """The names that changed, the certain ones first."""
    names = [name for name in review["names"] if name["fate"] != "same"]
    return sorted(names, key=lambda name: not name["certain"])


def unchanged(review: Review) -> list[Review]:
    """The names that did not change."""
    return [name for name in review["names"] if name["fate"] == "same"]
