"""Order of the overlay's versions, by PEP 440."""

from __future__ import annotations

import re

#: Public part of a version. Longer numbers than ours could be are not read.
_NUMBER = r"\d{1,18}"
_PUBLIC = re.compile(
    rf"""
    v?(?:(?P<epoch>{_NUMBER})!)?
    (?P<release>{_NUMBER}(?:\.{_NUMBER})*)
    (?:[._-]?(?P<pre>alpha|a|beta|b|preview|pre|c|rc)[._-]?(?P<pre_number>{_NUMBER})?)?
    (?P<post>-(?P<post_implicit>{_NUMBER})|[._-]?(?:post|rev|r)[._-]?(?P<post_number>{_NUMBER})?)?
    (?P<dev>[._-]?dev[._-]?(?P<dev_number>{_NUMBER})?)?
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)
#: Order of the phases of a release: only a development version, pre-releases, the release.
_PHASES = {"dev": 0, "a": 1, "b": 2, "c": 3, "p": 3, "r": 3, "": 4}


def newer(one: str, other: str) -> bool | None:
    """Return whether version ``one`` is newer than ``other``; None if either is malformed.

    A local label (``0.9.0+g1a2b3c4``) names a commit, and commits have no order here.

    >>> newer("0.10.0", "0.9.0"), newer("0.10.0.dev1", "0.10.0"), newer("0.9.0+g1", "0.9.0")
    (True, False, False)
    """
    first, second = _key(one), _key(other)
    return None if first is None or second is None else first > second


def _key(version: str) -> tuple[object, ...] | None:
    match = _PUBLIC.fullmatch(version.partition("+")[0])
    if match is None:
        return None
    release = [int(number) for number in match["release"].split(".")]
    while release[-1:] == [0]:
        release.pop()
    pre, post, dev = match["pre"], match["post"], match["dev"]
    phase = pre[0].lower() if pre else "dev" if dev and not post else ""
    return (
        int(match["epoch"] or 0),
        release,
        (_PHASES[phase], int(match["pre_number"] or 0)),
        int(match["post_implicit"] or match["post_number"] or 0) if post else -1,
        (0, int(match["dev_number"] or 0)) if dev else (1, 0),
    )
