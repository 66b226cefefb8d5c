"""One changed definition as review.json has it, whichever section it is in.

The keys: ``what`` (dotted name), ``file``, ``line``, ``now`` (its place in the release, or null),
``kind`` (the fate; in a patched file "changed", "new" or "gone"), ``detail`` (what has changed),
``why`` (what it has to do with us), ``ours`` (our modules and seams that it concerns),
``elsewhere`` (whether its change is shown in another section), and ``diff`` (unified, of the two
texts, with the lines of their files; empty if it is shown elsewhere).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlay.pin import PACKAGE

from review.changes import change, compare
from review.definitions import Definition, Definitions, is_static
from review.pieces import at, code, escape
from review.trees import definition_shape, text_of, unified

#: A finding, JSON-ready.
Finding = dict[str, Any]

#: At most so many names are in a warning.
_NAMED = 8

COLUMNS = ("what", "change", "why", "where")


def finding(
    base: Definitions,
    release: Definitions,
    place: tuple[str, str],
    definition: Definition,
    why: str,
    ours: Iterable[str],
    known: Collection[str] = (),
    whole: bool = True,
) -> Finding | None:
    """Follow a definition into the release.

    Args:
        base: the release that the overlay is for.
        release: the one under review.
        place: the module where the name is looked up, and the name there.
        definition: what it is in ``base``.
        why: what it has to do with us.
        ours: our modules and seams that it concerns.
        known: full names of definitions whose change is shown elsewhere.
        whole: whether the methods of a class count, or only what makes an instance of it.

    Returns:
        None if the name means the same in the release, wherever that is defined: ``kind`` is
        "moved" only if the name is not found in its old place.
    """
    definition, after = _static(definition), release.find(*place)
    if after is not None:
        after = _static(after)
        if definition_shape(definition) == definition_shape(after):
            return None
        kind, detail = compare(definition, after)
        if kind == "same":  # of a class the methods are not compared
            if not whole:
                return None
            kind, detail = "body", ""
        if definition.kind == "class" and whole:
            detail = " ".join(filter(None, (detail, _members(base, definition, release, after))))
        if (definition.module, definition.name) != (after.module, after.name):
            detail = f"It is {after.full_name} now. {detail}"
    else:
        followed = change(base, release, *place)
        kind, detail, after = followed.fate, followed.detail, followed.found
    elsewhere = definition.full_name in known
    return {
        "what": definition.full_name,
        "file": definition.path,
        "line": definition.line,
        "now": after.place if after is not None else None,
        "kind": kind,
        "detail": detail,
        "why": why,
        "ours": sorted(set(ours)),
        "elsewhere": elsewhere,
        "diff": "" if elsewhere else diff_of((base, definition), (release, after), whole),
    }


def diff_of(
    before: tuple[Definitions, Definition],
    after: tuple[Definitions, Definition | None],
    whole: bool = True,
) -> str:
    """A unified diff of a definition in two releases, with the lines of its files.

    Args:
        before: the definition, and the release that has it.
        after: the same in the other release; None if it is gone there.
        whole: False to leave out a class's methods, and what stands between them.

    Raises:
        OverlayError: git is not there, or fails.
    """
    return unified(
        text_of(*before, whole),
        text_of(*after, whole),
        (before[1].nodes, after[1].nodes if after[1] is not None else ()),
    )


def _members(base: Definitions, cls: Definition, release: Definitions, after: Definition) -> str:
    """A sentence on the members of a class that have changed."""
    sides = []
    for definitions, side in ((base, cls), (release, after)):
        module = definitions.module(side.module)
        members = module.definitions.items() if module is not None else ()
        outer = f"{side.name}."
        sides.append({n.removeprefix(outer): d for n, d in members if n.startswith(outer)})
    old, new = sides
    changed = [
        name
        for name in [*old, *(name for name in new if name not in old)]
        if name not in old
        or name not in new
        or definition_shape(_static(old[name])) != definition_shape(_static(new[name]))
    ]
    return f"Changed in it: {', '.join(changed)}." if changed else ""


def _static(definition: Definition) -> Definition:
    """What a module or a class says of an attribute, without what methods assign to it."""
    if definition.kind != "attribute":
        return definition
    nodes = [node for node in definition.nodes if is_static(node)]
    return replace(definition, nodes=nodes) if nodes else definition


def shown_names(names: Iterable[Mapping[str, Any]]) -> set[str]:
    """The full names whose change the section on names shows."""
    return {name["name"] for name in names if name["fate"] != "same" and name["certain"]}


def shown(findings: Iterable[Finding]) -> set[str]:
    """The full names whose change these findings show."""
    return {found["what"] for found in findings}


def rows(findings: Sequence[Finding], versions: tuple[str, str]) -> list[str]:
    """Rows of a table with :data:`COLUMNS`.

    Args:
        findings: the definitions.
        versions: of the base and of the release.
    """
    lines = []
    for each in findings:
        was = f"{each['file']}:{each['line']}"
        where = places(versions, was if each["kind"] != "new" else None, each["now"])
        fate = f"**{escape(each['kind'])}**"
        detail = f" {escape(each['detail'])}" if each["detail"] else ""
        also = " Its diff is shown elsewhere." if each["elsewhere"] else ""
        cells = (code(each["what"], True), fate + detail + also, escape(each["why"]), where)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def places(versions: tuple[str, str], was: str | None, now: str | None) -> str:
    """The places of a definition in two releases, for a cell; None where it is not."""
    sides = zip(versions, (was, now), strict=True)
    cells = [f"{escape(version)}: {at(version, place, True)}" for version, place in sides if place]
    return ", ".join(cells)


def listed(names: Sequence[str]) -> str:
    """Some names for a sentence; the sections have them all."""
    names = [name.removeprefix("vllm.") for name in names]
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def module_of_ours(path: str) -> str:
    """One of our modules as people call it."""
    return path.removeprefix(f"{PACKAGE}/").removesuffix(".py")
