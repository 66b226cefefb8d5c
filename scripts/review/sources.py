"""Upstream's changes that concern the overlay, found in its sources: each definition once.

A changed definition is shown in the first of these sections that it belongs to: the names that
we use, what we re-implement, callees, and the other changes in the files that we patch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from overlay.source import Overlay
from series.upstream import Upstream

from review import callees, mirrors, patched
from review.definitions import Definition, Definitions
from review.findings import Finding, shown, shown_names
from review.uses import Use

_SECTIONS = {"mirrors": mirrors, "callees": callees, "patched": patched}


def examine(
    overlay: Overlay,
    base: Upstream,
    release: Upstream,
    uses: Collection[Use],
    names: Sequence[Mapping[str, Any]],
) -> dict[str, list[Finding]]:
    """Find them.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        release: the same of the one under review.
        uses: those of :func:`review.uses.upstream_uses`.
        names: those of :func:`review.fates.fates`.

    Returns:
        The entries of review.json, by key.

    Raises:
        OverlayError: a source cannot be parsed, git fails, or one of our modules names something
            as mirrored that the release it is for does not have.
    """
    before, after = Definitions.of(base), Definitions.of(release)
    mirrored = mirrors.resolve(mirrors.declared(overlay.root), before)
    if release is base:
        return {key: [] for key in _SECTIONS}
    known = shown_names(names)
    found = {"mirrors": mirrors.examine(mirrored, before, after, known)}
    known |= shown(found["mirrors"])
    for _, definition in mirrored:
        if definition.kind == "class" and definition.full_name in shown(found["mirrors"]):
            known |= _members(definition, before) | _members(definition, after)
    inherited = callees.inherited_methods(overlay, base)
    roots = callees.roots_of(uses, mirrored, inherited, before)
    found["callees"] = callees.examine(roots, before, after, known)
    known |= shown(found["callees"])
    used = {use.name.rpartition(".")[2] for use in uses if use.certain and use.kind != "module"}
    found["patched"] = patched.examine(overlay.targets, before, after, known, used)
    return found


def _members(cls: Definition, definitions: Definitions) -> set[str]:
    """The full names of everything in a class, which is shown with it."""
    module = definitions.module(cls.module)
    names = module.definitions if module is not None else ()
    return {f"{cls.module}.{name}" for name in names if name.startswith(f"{cls.name}.")}


def warnings(found: Mapping[str, Sequence[Finding]]) -> Iterator[str]:
    """What needs eyes."""
    for key, section in _SECTIONS.items():
        yield from section.warnings(found[key])


def sections(
    review: Mapping[str, Any],
) -> Iterator[tuple[str, str, Sequence[str], list[str]]]:
    """Heading, anchor, columns and rows of each section that has any."""
    versions = review["base"]["release"], review["release"]["version"]
    for key, section in _SECTIONS.items():
        part = section.section(review.get(key, ()), versions)
        if part[3]:
            yield part
