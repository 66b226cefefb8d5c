"""The words of features and fixes: which are left out, and which patch serves which."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from overlay.errors import OverlayError, usage
from overlay.patches import FilePatch, Patch, header_fields
from overlay.pin import PACKAGE
from overlay.source import Overlay

#: The runtime's module that has the words.
MODULE = f"{PACKAGE}/registry.py"
#: The header's field of the words that a patch serves, or :data:`ALL` for a part of the frame.
SERVES, ALL = "Serves", "all"


@dataclass(frozen=True)
class Vocabulary:
    """The words that the runtime knows.

    Attributes:
        groups: ``features`` and ``fixes``, with their members.
        every: the members of both.
        without: what is left of a selection when some are off; dependents go with them.
        with_needs: these, and those that they build on.
    """

    groups: Mapping[str, frozenset[str]]
    every: frozenset[str]
    without: Callable[[Iterable[str], frozenset[str]], frozenset[str]]
    with_needs: Callable[[Iterable[str]], frozenset[str]]

    def closed(self, names: Iterable[str]) -> frozenset[str]:
        """These, and those that cannot be on without them."""
        return self.every - self.without(names, self.every)


def vocabulary(overlay: Overlay) -> Vocabulary:
    """Read the words from the runtime's own module, which needs no vLLM.

    Raises:
        OverlayError: the overlay has no such module, or not the one that is pinned.
    """
    if MODULE not in overlay.pin.result:
        raise usage(
            "this overlay has no features and fixes to choose from",
            "leave --features, --fixes and --leave out",
        )
    names: dict[str, object] = {"__name__": "registry"}
    code = compile(overlay.added_bytes(MODULE), MODULE, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102 (it is ours, and proven by checksum)
    parts = (names[name] for name in ("GROUPS", "ALL", "without", "with_needs"))
    return Vocabulary(*parts)  # type: ignore[arg-type]


def left_out(words: Vocabulary, chosen: Mapping[str, str | None]) -> frozenset[str]:
    """The features and fixes that a choice leaves out, with all that needs them.

    Args:
        words: those that there are.
        chosen: for each group, its option's value, which is read as ``VLLM_READINESS`` is:
            ``on``, ``off``, ``-a,-b`` (all but these), ``a,b`` (only these); None is ``on``.

    Raises:
        OverlayError: a word is unknown, or words with and without ``-`` are mixed.
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
            "it mixes names with '-' (all but these) and names without",
            "use one form",
            f"--{group}={text}",
        )
    return words.with_needs(names) & members


def _not_understood(words: Vocabulary, group: str, text: str, name: str) -> OverlayError:
    members = words.groups[group]
    owner = next((other for other, each in words.groups.items() if name in each), None)
    if owner:
        next_step = f"give it to --{owner}"
    else:
        meant = get_close_matches(name, [*sorted(members), "on", "off"], 1)
        next_step = f"{f'did you mean {meant[0]}? ' if meant else ''}valid: on, off, or names "
        next_step += f"(with '-': all but these): {', '.join(sorted(members))}"
    return usage(f"{name!r} is not one of the {group}", next_step, f"--{group}={text}")


def served(patch: Patch) -> frozenset[str] | None:
    """The features and fixes that a patch serves; None for one that all of them need."""
    text = header_fields(patch.header).get(SERVES, ALL)
    names = frozenset(word.strip() for word in text.replace("\n", " ").split(","))
    return None if ALL in names else names


def stays(patch: Patch, without: Collection[str]) -> bool:
    """Whether a patch is needed when these words are left out."""
    names = served(patch)
    return names is None or not names.issubset(without)


def is_mark(file: FilePatch) -> bool:
    """Whether a change is but a comment, which a file needs only if something else changes it."""
    return all(
        not hunk.old and all(line.startswith(b"#") for line in hunk.new) for hunk in file.hunks
    )


def words_of(overlay: Overlay, path: str) -> frozenset[str] | None:
    """The words that have to be left out for a file to be left alone.

    Args:
        overlay: the whole overlay.
        path: the file's.

    Returns:
        None if that does not do: a patch of it is needed by all features and fixes.
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
    """The options of ``apply`` that leave some files alone, or None if none do.

    Args:
        overlay: the whole overlay.
        paths: of files that it changes.
        without: the features and fixes that are left out already.
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
    """The options of ``apply`` that leave out these features and fixes, and what needs them.

    Raises:
        OverlayError: as for :func:`vocabulary`.
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
