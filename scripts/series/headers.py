"""The DEP-3 header of a new patch, to be completed by its author."""

from __future__ import annotations

import datetime

from series.check import FIELDS


def skeleton(description: str) -> str:
    """A header that has every required field; all but Description and Last-Update are empty."""
    texts = {"Description": description, "Last-Update": datetime.date.today().isoformat()}
    return "".join(f"{name}: {texts.get(name, '')}".rstrip() + "\n" for name in FIELDS)
