"""The fate, in another release, of each upstream name that the overlay uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from series.upstream import Upstream

from review.changes import FATES, Change, change, signature
from review.definitions import Definition, Definitions
from review.findings import diff_of
from review.uses import HOW, Use


def fates(uses: Iterable[Use], base: Upstream, release: Upstream) -> list[dict[str, Any]]:
    """The fate of each name that is used, the worst first.

    Args:
        uses: those of :func:`review.uses.upstream_uses`.
        base: the release that the overlay is for.
        release: the one under review.

    Returns:
        The entries under "names" in review.json.

    Raises:
        OverlayError: a source cannot be parsed, or git fails.
    """
    before, after = Definitions.of(base), Definitions.of(release)

    @cache
    def followed(module: str, name: str) -> Change:
        return change(before, after, module, name)

    grouped: dict[tuple[bool, str], list[Use]] = {}
    for use in uses:
        grouped.setdefault((use.certain, use.name), []).append(use)
    entries = []
    for (certain, name), group in grouped.items():
        changes = []
        for place in group[0].places:
            definition = before.find(*place)
            assert definition is not None
            changes.append((definition, followed(*place)))
        origin, combined = _combined(changes)
        detail = combined.detail
        if combined.fate != "same":
            detail = " ".join(filter(None, (detail, _lost_keywords(group, before, after))))
        entries.append(
            {
                "name": name,
                "kind": group[0].kind,
                "fate": combined.fate,
                "was": origin.place,
                "now": combined.now,
                "detail": detail,
                "diff": _diff((before, origin), (after, combined.found), combined.fate),
                "how": [how for how in HOW if any(use.how == how for use in group)],
                "users": sorted({use.user for use in group}, key=_path_and_line),
                "certain": certain,
            }
        )
    return sorted(entries, key=lambda e: (-FATES.index(e["fate"]), not e["certain"], e["name"]))


def _combined(changes: Sequence[tuple[Definition, Change]]) -> tuple[Definition, Change]:
    """The fate of a name that may be any of several definitions.

    It is gone only if all of them are, and moved if some are.
    """
    if len(changes) == 1:
        return changes[0]
    left = [pair for pair in changes if pair[1].fate != "gone"]
    origin, worst = max(left or changes, key=lambda pair: FATES.index(pair[1].fate))
    # Nobody knows which one is meant: if one of them is gone, the name is not the same.
    fate = worst.fate if len(left) in (0, len(changes)) else "moved"
    parts = []
    for definition, followed in changes:
        if followed.fate != "same":
            why = f" ({followed.detail.rstrip('.')})" if followed.detail else ""
            parts.append(f"{definition.full_name}: {followed.fate}{why}.")
    same = [definition.full_name for definition, followed in changes if followed.fate == "same"]
    if same:
        parts.append(f"{'As before' if parts else 'May be'}: {', '.join(same)}.")
    return origin, Change(fate, worst.now, " ".join(parts), worst.found)


def _diff(
    before: tuple[Definitions, Definition], after: tuple[Definitions, Definition | None], fate: str
) -> str:
    """What has changed; of a class that has changed only in its methods, the methods."""
    if fate == "same":
        return ""
    return diff_of(before, after, whole=False) or diff_of(before, after)


def _lost_keywords(group: Sequence[Use], base: Definitions, release: Definitions) -> str:
    """A sentence on keywords that we pass and that the release does not accept."""
    passed = {keyword for use in group for keyword in use.keywords}
    if len(group[0].places) != 1 or not passed:
        return ""
    before, after = base.find(*group[0].places[0]), release.find(*group[0].places[0])
    if before is None or after is None:
        return ""
    if any(part.startswith("parameter **") for part in signature(after)):
        return ""
    lost = sorted(passed & _keywords(before) - _keywords(after))
    return f"We pass {', '.join(lost)} by name." if lost else ""


def _keywords(definition: Definition) -> set[str]:
    """The names of a function's parameters, or of a class's fields."""
    matches = (re.match(r"(?:parameter|field) (\w+)", part) for part in signature(definition))
    return {match[1] for match in matches if match}


def _path_and_line(user: str) -> tuple[str, int]:
    path, _, rest = user.rpartition(":")
    return path, int(rest.split()[0])
