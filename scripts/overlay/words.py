"""Features and fixes of the overlay, and the patches and files that serve them."""

from __future__ import annotations

import re
from collections.abc import Collection
from types import SimpleNamespace

from overlay.patches import FilePatch, Patch, header_fields
from overlay.pin import PACKAGE
from overlay.source import Overlay

#: The runtime's module of features and fixes.
MODULE = f"{PACKAGE}/registry.py"
#: Added line that is only needed together with other changes of its file.
_MARK = re.compile(rb"#|from vllm\.v1\.readiness(\.\w+)* import \w+ as readiness$")
#: Header field with the features and fixes that need a patch; :data:`ALL` stands for all.
SERVES, ALL = "Serves", "all"


def registry(overlay: Overlay) -> SimpleNamespace:
    """Run the runtime's registry of features and fixes, which imports nothing of vLLM.

    Raises:
        OverlayError: the module fails its checksum.

    >>> "seeds" in registry(small).ALL
    True
    """
    names: dict[str, object] = {"__name__": "registry"}
    code = compile(overlay.added_bytes(MODULE), MODULE, "exec", dont_inherit=True)
    exec(code, names)  # noqa: S102 (it is ours, and proven by checksum)
    return SimpleNamespace(**names)


def closed(overlay: Overlay, names: Collection[str]) -> frozenset[str]:
    """Return features and fixes, and their dependents; OverlayError as for :func:`registry`.

    >>> closed(small, ["seeds"])
    frozenset({'seeds'})
    """
    if not names:
        return frozenset()
    known = registry(overlay)
    kept: frozenset[str] = known.without(names, known.ALL)
    return frozenset(known.ALL) - kept


def served(patch: Patch) -> frozenset[str] | None:
    """Return the features and fixes that need a patch; None if all of them need it.

    >>> [served(patch) for patch in small.series.patches]
    [None, frozenset({'seeds'})]
    """
    text = header_fields(patch.header).get(SERVES, ALL)
    names = frozenset(word.strip() for word in text.replace("\n", " ").split(","))
    return None if ALL in names else names


def stays(patch: Patch, without: Collection[str]) -> bool:
    """Return whether a patch is needed without these features and fixes.

    >>> [stays(patch, {"seeds"}) for patch in small.series.patches]
    [True, False]
    """
    names = served(patch)
    return names is None or not names.issubset(without)


def is_mark(file: FilePatch) -> bool:
    """Return whether a change only adds comments and the import of the overlay.

    These lines are needed only together with another change of the file.

    >>> is_mark(small.series.patches[0].files[0])
    False
    """
    return all(not hunk.old and all(map(_MARK.match, hunk.new)) for hunk in file.hunks)


def words_of(overlay: Overlay, path: str) -> frozenset[str] | None:
    """Return the names that change a file; None if every feature and fix needs a change in it.

    ``overlay`` is the whole overlay.

    >>> words_of(small, "vllm/v1/two.py")
    frozenset({'seeds'})
    """
    words: set[str] = set()
    for patch in overlay.series.patches:
        if any(file.path == path and not is_mark(file) for file in patch.files):
            names = served(patch)
            if names is None:
                return None
            words |= names
    return frozenset(words)
