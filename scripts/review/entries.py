"""The definitions that have changed, each once with its text: by file, folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from review.definitions import module_name
from review.findings import listed
from review.pieces import anchor_of, at, code, escape, folded, headed, hunks

#: The sections of definitions, each by its key in review.json, in the order of the page.
SECTIONS = ("names", "mirrors", "callees", "patched")


@dataclass(frozen=True)
class Entry:
    """One definition that has changed.

    Attributes:
        section: one of :data:`SECTIONS`.
        name: dotted.
        was: its place in the base; in the release if it is new there.
        now: its place in the release; None if it is gone.
        fate: what became of it, as the page says it.
        text: more of that, and what it has to do with us.
        diff: unified; empty if another entry has it.
        elsewhere: whether another entry has it.
        anchor: of the entry.
    """

    section: str
    name: str
    was: str
    now: str | None
    fate: str
    text: str
    diff: str
    elsewhere: bool
    anchor: str

    @property
    def file(self) -> str:
        """The file that has it in the base."""
        return self.was.rpartition(":")[0]


def entries(review: Mapping[str, Any]) -> list[Entry]:
    """Every definition that has changed, in the order of the page."""
    made: list[Entry] = []
    anchors: set[str] = set()
    for section in SECTIONS:
        for found in review.get(section, ()):
            if found.get("fate") == "same" or not found.get("counts", True):
                continue
            fields = _of_name(found) if section == "names" else _of_finding(found)
            stem = anchor = f"{section}-{anchor_of(fields['name'])}"
            while anchor in anchors:  # one name may be found in two ways
                stem = anchor = f"{stem}-"
            anchors.add(anchor)
            made.append(Entry(section=section, anchor=anchor, **fields))
    return made


def file_anchor(section: str, path: str) -> str:
    """Where a section has what has changed in a file."""
    return f"{section}-in-{anchor_of(path)}"


def folds(found: Sequence[Entry], review: Mapping[str, Any], where: Mapping[str, str]) -> list[str]:
    """One folded part for each file, with the definitions in it.

    Args:
        found: the entries of one section.
        review: the contents of ``review.json``.
        where: the anchor of the entry that has the diff of a definition, by its dotted name.
    """
    parts = []
    in_order = sorted(found, key=lambda entry: entry.file)
    for path, group in groupby(in_order, lambda entry: entry.file):
        inside = list(group)
        names = listed([_short(entry) for entry in inside])
        body = [_entry(each, review, where) for each in inside]
        anchor = f'<a id="{file_anchor(inside[0].section, path)}"></a>'
        body[0] = body[0].replace("#### ", f"#### {anchor}", 1)
        parts.append(folded(f"{path}: {len(inside):,} changed: {names}", "\n\n".join(body)))
    return parts


def anchors(found: Sequence[Entry]) -> dict[str, str]:
    """By dotted name, the anchor of each definition; of several, that of the one with a diff."""
    ordered = sorted(found, key=lambda entry: bool(entry.diff))
    return {entry.name: entry.anchor for entry in ordered}


def of_section(found: Sequence[Entry], section: str) -> Iterator[Entry]:
    """The entries of one section."""
    return (entry for entry in found if entry.section == section)


def _entry(entry: Entry, review: Mapping[str, Any], where: Mapping[str, str]) -> str:
    base, release = review["base"]["release"], review["release"]["version"]
    places = [] if entry.fate == "new" else [f"{escape(base)}: {at(base, entry.was)}"]
    if entry.now is not None:
        places.append(f"{escape(release)}: {at(release, entry.now)}")
    text = escape(entry.text)
    if entry.elsewhere:
        other = where.get(entry.name)
        text += (
            f" Its diff is [in another section](#{other})."
            if other
            else " It is shown with its class."
        )
    title = f"{code(_short(entry))} **{escape(entry.fate)}**"
    parts = [headed(4, entry.anchor, title), text, ", ".join(places)]
    if entry.diff:
        parts.append(hunks(base, release, entry.diff))
    return "\n\n".join(parts)


def _short(entry: Entry) -> str:
    """The name without that of the module, which the file says."""
    return entry.name.removeprefix(f"{module_name(entry.file)}.")


def _of_name(name: Mapping[str, Any]) -> dict[str, Any]:
    changed = " changed" * (name["fate"] in ("signature", "body"))
    by_name = "" if name["certain"] else " (found by its name alone)"
    users = f"{', '.join(name['users'])} ({', '.join(name['how'])})"
    return {
        "name": name["name"],
        "was": name["was"],
        "now": name["now"],
        "fate": f"{name['fate']}{changed}",
        "text": f"A {name['kind']}{by_name}. {name['detail']} Used by {users}.",
        "diff": name.get("diff", ""),
        "elsewhere": False,
    }


def _of_finding(found: Mapping[str, Any]) -> dict[str, Any]:
    changed = " changed" * (found["kind"] in ("signature", "body"))
    return {
        "name": found["what"],
        "was": f"{found['file']}:{found['line']}",
        "now": found["now"],
        "fate": f"{found['kind']}{changed}",
        "text": f"{found['detail']} {found['why']}.".strip(),
        "diff": found["diff"],
        "elsewhere": found["elsewhere"],
    }
