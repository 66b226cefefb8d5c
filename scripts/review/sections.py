"""The sections of a review that other modules make of their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from review import moves, requirements, soundness, trying

#: By the key of the findings in review.json, in the order of the sections.
_SECTIONS = {
    "tried": trying.section,
    "soundness": soundness.section,
    "moves": moves.section,
    "requirements": requirements.section,
}


def of_findings(
    review: Mapping[str, Any],
) -> Iterator[tuple[str, str, Sequence[str], list[str]]]:
    """Heading, anchor, columns and rows of each section that has findings."""
    for key, section in _SECTIONS.items():
        if findings := review.get(key):
            yield section(findings)
