"""Selections of features and fixes by name, and the patches that they need."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from overlay.errors import OverlayError, usage
from overlay.patches import FilePatch, Patch, header_fields
from overlay.pin import PACKAGE
from overlay.source import Overlay

#: The runtime's module of features and fixes.
MODULE = f"{PACKAGE}/registry.py"
#: Added line that is only needed together with other changes of its file.
_MARK = re.compile(rb"#|from vllm\.v1\.readiness(\.\w+)* import \w+ as readiness$")
#: Header field with the features and fixes that need a patch; :data:`ALL` stands for all.
SERVES, ALL = "Serves", "all"


@dataclass(frozen=True)
class Vocabulary:
    """Names of all features and fixes.

    Attributes:
        groups: ``features`` and ``fixes``, with their members.
        every: the members of both.
        without: removes names and their dependents from a selection.
        with_needs: adds the names that a selection depends on.
    """

    groups: Mapping[str, frozenset[str]]
    every: frozenset[str]
    without: Callable[[Iterable[str], frozenset[str]], frozenset[str]]
    with_needs: Callable[[Iterable[str]], frozenset[str]]

    def closed(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names and their dependents."""
        return self.every - self.without(names, self.every)


def vocabulary(overlay: Overlay) -> Vocabulary:
    """Read the names from the runtime's registry, which imports nothing of vLLM.

    Raises:
        OverlayError: the module is missing, or fails its checksum.
    """
    if MODULE not in overlay.pin.result:
        raise usage(
            "this overlay has no features and fixes to choose from",
            "omit --features, --fixes and --leave",
        )
    names: dict[str, object] = {"__name__": "registry"}
    code = compile(overlay.added_bytes(MODULE), MODULE, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102 (it is ours, and proven by checksum)
    parts = (names[name] for name in ("GROUPS", "ALL", "without", "with_needs"))
    return Vocabulary(*parts)  # type: ignore[arg-type]


def left_out(words: Vocabulary, chosen: Mapping[str, str | None]) -> frozenset[str]:
    """Return the features and fixes that a choice leaves out, with their dependents.

    ``chosen`` maps each group to its option's value, in the grammar of ``VLLM_READINESS``: ``on``,
    ``off``, ``-a,-b`` (all but these), ``a,b`` (only these); None is ``on``.

    Raises:
        OverlayError: a name is unknown, or names with and without ``-`` are mixed.
    """
    on = frozenset().union(
        *(_on(words, group, text) for group, text in chosen.items() if text is not None),
        *(words.groups[group] for group, text in chosen.items() if text is None),
    )
    return words.closed(words.every - on)


def _on(words: Vocabulary, group: str, text: str) -> frozenset[str]:
    members = words.groups[group]
    given = [word.strip() for word in text.split(",")]
    if given == ["on"]:
        return members
    if given == ["off"]:
        return frozenset()
    names = [word.removeprefix("-") for word in given]
    excluding = [word.startswith("-") for word in given]
    for name in names:
        if name not in members:
            raise _not_understood(words, group, text, name)
    if all(excluding):
        return members - frozenset(names)
    if any(excluding):
        raise usage(
            "mixes names with '-' (all but these) and names without",
            "use one form",
            f"--{group}={text}",
        )
    return words.with_needs(names) & members


def _not_understood(words: Vocabulary, group: str, text: str, name: str) -> OverlayError:
    members = words.groups[group]
    owner = next((other for other, names in words.groups.items() if name in names), None)
    if owner:
        next_step = f"use --{owner}"
    else:
        meant = get_close_matches(name, [*sorted(members), "on", "off"], 1)
        next_step = f"{f'did you mean {meant[0]}? ' if meant else ''}valid: on, off, or names "
        next_step += f"(with '-': all but these): {', '.join(sorted(members))}"
    return usage(f"{name!r} is not one of the {group}", next_step, f"--{group}={text}")


def served(patch: Patch) -> frozenset[str] | None:
    """Return the features and fixes that need a patch; None if all of them need it."""
    text = header_fields(patch.header).get(SERVES, ALL)
    names = frozenset(word.strip() for word in text.replace("\n", " ").split(","))
    return None if ALL in names else names


def stays(patch: Patch, without: Collection[str]) -> bool:
    """Return whether a patch is needed without these features and fixes."""
    names = served(patch)
    return names is None or not names.issubset(without)


def is_mark(file: FilePatch) -> bool:
    """Return whether a change only adds comments and the import of the overlay.

    These lines are needed only together with another change of the file.
    """
    return all(not hunk.old and all(map(_MARK.match, hunk.new)) for hunk in file.hunks)


def words_of(overlay: Overlay, path: str) -> frozenset[str] | None:
    """Return the names that change a file; None if every feature and fix needs a change in it.

    ``overlay`` is the whole overlay.
    """
    words: set[str] = set()
    for patch in overlay.series.patches:
        if any(file.path == path and not is_mark(file) for file in patch.files):
            names = served(patch)
            if names is None:
                return None
            words |= names
    return frozenset(words)


def options_that_leave(
    overlay: Overlay, paths: Iterable[str], without: Iterable[str]
) -> str | None:
    """Return the options of ``apply`` that leave ``paths`` unchanged; None if impossible.

    ``without`` names the features and fixes that are already left out.
    """
    names = set(without)
    for path in paths:
        words = words_of(overlay, path)
        if not words:
            return None
        names |= words
    try:
        return options_without(overlay, names) if names else None
    except OverlayError:
        return None


def options_without(overlay: Overlay, names: Iterable[str]) -> str:
    """Return the options of ``apply`` that leave out these names and their dependents.

    Raises OverlayError as :func:`vocabulary` does.
    """
    known = vocabulary(overlay)
    gone = known.closed(known.every.intersection(names))
    options = []
    for group, members in known.groups.items():
        if members <= gone:
            options.append(f"--{group}=off")
        elif members & gone:
            options.append(f"--{group}=" + ",".join(f"-{name}" for name in sorted(members & gone)))
    return " ".join(options)
