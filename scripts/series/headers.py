"""The DEP-3 header of a new patch, to be completed by its author."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from overlay.patches import header_fields
from overlay.words import SERVES

from series.check import FIELDS

#: DEP-3's field for where a change is from. Only who takes it over can say that.
ORIGIN = "Origin"


def skeleton(known: Mapping[str, str], foreign: bool = False) -> str:
    """A header that has every required field; those that are not known are empty.

    Args:
        known: field to its text; further lines are indented as DEP-3 asks for.
        foreign: whether the change is somebody else's: its origin has to be stated, and it serves
            none of our features and fixes.
    """
    names = list(FIELDS)
    if foreign:
        names.insert(names.index("Bug") + 1, ORIGIN)
        names.remove(SERVES)
    texts = {"Last-Update": datetime.date.today().isoformat(), **known}
    return "".join(_field(name, texts.get(name, "")) for name in names)


def empty_fields(header: str) -> list[str]:
    """The fields of a header that are still to be filled in."""
    return [name for name, text in header_fields(header).items() if not text]


def _field(name: str, text: str) -> str:
    first, *others = [" ".join(line.split()) for line in text.splitlines()] or [""]
    return "\n".join([f"{name}: {first}".rstrip(), *(f" {line or '.'}" for line in others)]) + "\n"
