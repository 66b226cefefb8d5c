"""What runs in a release, and what of the overlay can be carried over to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from overlay.source import Overlay
from series.upstream import Upstream

from review import reach, runners, verdicts
from review.merging import JudgedPatch
from review.references import References
from review.uses import Use
from review.vocabulary import Vocabulary
from review.wheels import Release
from review.words import Seams

#: What is not asked of the overlay's own release.
NOTHING: Mapping[str, Any] = {"summary": [], "runners": None, "classes": [], "words": []}


def examine(
    overlay: Overlay,
    base: Upstream,
    release: Release,
    patches: Sequence[JudgedPatch],
    overlaid: Mapping[str, bytes],
    uses: Iterable[Use],
    names: Iterable[Mapping[str, Any]],
    judged: Iterable[Mapping[str, Any]],
    found: Mapping[str, Iterable[Mapping[str, Any]]],
) -> dict[str, Any]:
    """What runs in a release, and the verdict on each feature and fix; first in few sentences.

    Args:
        overlay: the overlay.
        base: upstream's files of the release that it is for.
        release: the one under review.
        patches: the series on it, judged.
        overlaid: by path in the pinned release, the patched files there.
        uses: those of :func:`review.uses.upstream_uses`.
        names: the entries under "names" in review.json.
        judged: those under "fixes".
        found: those of :mod:`review.sources`.

    Returns:
        The entries "summary", "runners", "classes" and "words".
    """
    before, after = References.of(base), References.of(release.upstream)
    vocabulary = Vocabulary(overlay.root / "vendor_overlay")
    seams = Seams(overlay.series, base)
    choice = runners.examine(before, after)
    classes = reach.examine(reach.holders(uses), before, after)
    words = verdicts.examine(
        vocabulary,
        seams,
        patches,
        names,
        judged,
        runners.dead(choice),
        verdicts.without_v1(seams, before, overlaid),
        [*verdicts.of_classes(classes, seams, overlaid), *_beyond(found)],
    )
    sentences = runners.sentences(choice, overlay.pin.release, release.version)
    return {
        "summary": [*sentences, *verdicts.sentences(words)],
        "runners": choice,
        "classes": classes,
        "words": words,
    }


def _beyond(found: Mapping[str, Iterable[Mapping[str, Any]]]) -> Iterator[tuple[str, str]]:
    """Each module or seam that a change in a mirror or a callee concerns, with the reason."""
    for key in ("mirrors", "callees"):
        for each in found[key]:
            reason = f"{each['what'].removeprefix('vllm.')}: {each['kind']}, {each['why']}"
            for concern in each["ours"]:
                yield concern, reason
