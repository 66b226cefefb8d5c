"""The warnings of a review, each with links to what it speaks of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from review import fixes, moves, reach, requirements, runners, soundness, trying
from review.entries import Entry, file_anchor
from review.pieces import anchor_of, escape, one_line
from review.verdicts import anchor as word_anchor

#: Names with dots, paths, and the numbers of patches.
_TOKEN = re.compile(r"[A-Za-z_][\w./-]*\w|\b\d{4}\b")
#: The sections whose warnings say nothing that has a place of its own: what makes their sentences
#: of the findings under a key, the key, and the anchor of the section.
_WHOLE = (
    (runners.warnings, "runners", "words"),
    (reach.warnings, "classes", "classes"),
    (fixes.warnings, "fixes", "fixes"),
    (moves.warnings, "moves", "moves"),
    (soundness.warnings, "soundness", "soundness"),
    (requirements.warnings, "requirements", "requirements"),
    (trying.warnings, "tried", "tried"),
)


def lines(
    review: Mapping[str, Any], entries: Iterable[Entry], anchors: Mapping[str, str]
) -> list[str]:
    """The items of a list.

    Args:
        review: the contents of ``review.json``.
        entries: the definitions that the page shows.
        anchors: by dotted name, where it shows them.
    """
    places = {name.removeprefix("vllm."): anchor for name, anchor in anchors.items()}
    places |= anchors
    places |= {
        entry.file: file_anchor("patched", entry.file)
        for entry in entries
        if entry.section == "patched"
    }
    places |= {
        patch["name"].partition("-")[0]: anchor_of(patch["name"]) for patch in review["patches"]
    }
    sections = dict(_sections(review))
    words = {word["name"] for word in review["words"]}
    made = []
    for warning in review["warnings"]:
        text = _linked(one_line(warning), places, words)
        if "](#" not in text and warning in sections:
            text += f" [(where)](#{sections[warning]})"
        made.append(f"- {text}")
    return made


def _sections(review: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Sentences, each with the section that it is made of."""
    for warnings, key, anchor in _WHOLE:
        findings = review.get(key)
        if findings:
            yield from ((sentence, anchor) for sentence in warnings(findings))


def _linked(warning: str, places: Mapping[str, str], words: set[str]) -> str:
    """A sentence with a link from each name that the page shows."""
    parts, end, module = [], 0, ""
    for token in _TOKEN.finditer(warning):
        name = token[0]
        if name.endswith(".py") and name in places:
            module = name.removesuffix(".py").replace("/", ".")
        anchor = places.get(name) or places.get(f"{module}.{name}")
        if warning[: token.start()].endswith("the fix ") and name in words:
            anchor = word_anchor(name)
        if anchor:
            parts += [_escaped(warning[end : token.start()]), f"[{escape(name)}](#{anchor})"]
            end = token.end()
    return "".join([*parts, _escaped(warning[end:])])


def _escaped(text: str) -> str:
    """Escaped, with the blanks at its ends."""
    before = " " * (text[:1] == " ")
    return before + escape(text) + " " * (text[1:] != "" and text[-1:] == " ")
