"""What the page and the Markdown say in the same words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

Found = Mapping[str, Any]

#: What each verdict on a release means.
VERDICTS = {
    "clean": "Clean",
    "needs eyes": "Needs eyes",
    "conflicts": "Conflicts",
}
_MEANING = {
    "clean": "nothing here needs a decision.",
    "needs eyes": "everything merges, and something below must be looked at first.",
    "conflicts": "something does not merge, and needs its author.",
}
_PATCHES = {
    "applies": ("applies as it is", "apply as they are"),
    "moved": ("applies moved", "apply moved"),
    "conflicts": ("conflicts", "conflict"),
    "obsolete": ("is obsolete", "are obsolete"),
}
#: What became of a name.
FATES = {
    "same": "same",
    "signature": "signature changed",
    "body": "body changed",
    "moved": "moved",
    "gone": "gone",
}


def title(review: Found) -> str:
    """What was reviewed."""
    base = review["base"]
    if review["own"]:
        return f"Overlay {base['overlay']} on vLLM {base['release']}"
    return f"vLLM {review['release']['version']} for overlay {base['overlay']}"


def verdict(review: Found) -> str:
    """The verdict on the whole, and what it means, in one sentence."""
    said = str(review["verdict"])
    return f"{VERDICTS.get(said, said)}: {_MEANING[said]}" if said in _MEANING else said


def counted(number: int, one: str, more: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else more or one + 's'}"


def patches(review: Found) -> str:
    """How many patches fared how."""
    verdicts = Counter(patch["verdict"] for patch in review["patches"])
    known = [(verdicts.pop(each), *texts) for each, texts in _PATCHES.items() if each in verdicts]
    parts = [counted(number, f"patch {one}", f"patches {more}") for number, one, more in known]
    parts += [f"{number:,} {each}" for each, number in verdicts.items()]
    return ", ".join(parts) + "." if parts else "There are no patches."


def changed(review: Found) -> list[Found]:
    """The names that changed, those found for certain first."""
    found = [name for name in review["names"] if name["fate"] != "same"]
    return sorted(found, key=lambda name: not name["certain"])


def unchanged(review: Found) -> list[Found]:
    """The names that did not change."""
    return [name for name in review["names"] if name["fate"] == "same"]
