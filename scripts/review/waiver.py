"""The justification of every patch in one table, for teams that must give one.

Rules for changed copies of vLLM, InferenceX's for instance, ask of each patch its name, its
reason, a link to upstream, and when it is removed. All of that is in the patches' DEP-3 headers;
which features and fixes a patch serves follows from what it calls.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from overlay.patches import Patch, header_fields
from overlay.source import Overlay

from review.fixes import NOT_MENDED
from review.merging import APPLIES, CONFLICTS, MOVED, OBSOLETE, title
from review.pieces import code, counted, escape, one_line, row, table
from review.vocabulary import Vocabulary
from review.words import Seams

#: What stands for the words of a patch that all of them need, and of one for the probe.
FRAME, PROBE = "needed by all", "the probe, if it is on"
_PROBE = re.compile(rb"\breadiness\.(expose|install)\(")
#: Of a header: no issue, and a patch that upstream has no use for.
_NO_BUG, _NOT_NEEDED = "none", "not-needed"
#: Verdict to what a person does about it.
_MEANING = {
    APPLIES: "at the same lines",
    MOVED: "at other lines",
    CONFLICTS: "a person resolves it first",
    OBSOLETE: "it can go",
}
COLUMNS = ("patch", "reason", "features and fixes", "files", "upstream", "removed when")


def markdown(
    overlay: Overlay, vocabulary: Vocabulary, seams: Seams, review: Mapping[str, Any] | None
) -> str:
    """Return the table, with a paragraph above it that says what it is of.

    Args:
        overlay: the overlay.
        vocabulary: of its modules.
        seams: of its patches.
        review: the contents of review.json, of the release whose verdicts are shown; None for no
            verdicts.
    """
    pin, patches = overlay.pin, overlay.series.patches
    lines = [
        f"vllm-readiness-overlay {pin.overlay} changes {counted(len(overlay.targets), 'file')} of "
        f"vLLM {pin.release} by {counted(len(patches), 'patch', 'patches')}, and adds "
        f"{counted(len(overlay.added), 'file')} of its own. "
        "`VLLM_READINESS=off` runs upstream's code everywhere, `VLLM_READINESS=-WORD` without one "
        "feature or fix; `make revert` restores upstream's files, byte for byte.",
    ]
    columns = list(COLUMNS)
    rows = [_cells(patch, overlay, vocabulary, seams) for patch in patches]
    if review is not None:
        columns.append(f"on vLLM {review['release']['version']}")
        lines.append(_summary(review))
        judged = {patch["name"]: patch for patch in review["patches"]}
        for patch, cells in zip(patches, rows, strict=True):
            verdict = judged[patch.name]
            parts = [f"{verdict['verdict']}: {escape(verdict['because'])}"]
            cells.append("; ".join([*parts, *_mended(patch.name, review)]))
    return "\n\n".join([*lines, table("", columns, [row(*cells) for cells in rows])]) + "\n"


def _summary(review: Mapping[str, Any]) -> str:
    """Return a sentence on the last column, with the number of patches of each verdict."""
    version, date = review["release"]["version"], review["date"]
    counts = Counter(patch["verdict"] for patch in review["patches"])
    verdicts = [f"{counts[word]} {word} ({text})" for word, text in _MEANING.items()]
    return (
        f"The last column says whether each patch applies to vLLM {version} "
        f"(`make review RELEASE={version}`, {date}): {', '.join(verdicts)}."
    )


def _mended(patch: str, review: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the release has of each fix that the patch is of, unless it has nothing."""
    for fix in review["fixes"]:
        if fix["has"] != NOT_MENDED and any(own["name"] == patch for own in fix["patches"]):
            has = f"{code(fix['name'])} is {fix['has']} ({escape(fix['because'])})"
            yield f"{has}: {escape(fix['todo'])}"


def _cells(patch: Patch, overlay: Overlay, vocabulary: Vocabulary, seams: Seams) -> list[str]:
    fields = header_fields(patch.header)
    _, _, reason = fields["Description"].partition("\n")
    return [
        f"{patch.name[:4]} {escape(title(patch))}",
        escape(one_line(reason)),
        _served(patch, vocabulary, seams),
        _files(patch, overlay),
        _upstream(fields),
        escape(one_line(fields["Drop-When"])),
    ]


def _served(patch: Patch, vocabulary: Vocabulary, seams: Seams) -> str:
    """Return the features and fixes that need the patch, or what else does."""
    words = seams.of_patch(patch.name)
    kinds = [
        f"{kind} {', '.join(map(code, sorted(served)))}"
        for kind, served in (
            ("features", words & vocabulary.features),
            ("fixes", words & vocabulary.fixes),
        )
        if served
    ]
    lines = (line for file in patch.files for hunk in file.hunks for line in hunk.new)
    return "; ".join(kinds) or (PROBE if any(map(_PROBE.search, lines)) else FRAME)


def _files(patch: Patch, overlay: Overlay) -> str:
    """Return the paths of the changed files, unless it is every one that the overlay changes."""
    if len(patch.files) == len(overlay.targets):
        return f"all {len(overlay.targets)}, which the other rows name"
    return ", ".join(code(file.path, in_table=True) for file in patch.files)


def _upstream(fields: Mapping[str, str]) -> str:
    """Return the link to upstream, and what has been sent there."""
    bug, forwarded = fields["Bug"], fields["Forwarded"]
    link = "no issue" if bug == _NO_BUG else f"<{bug}>"
    if forwarded == _NOT_NEEDED:
        return f"{link}; nothing to send there"
    return f"{link}; {'not sent there' if forwarded == 'no' else f'sent: {escape(forwarded)}'}"
