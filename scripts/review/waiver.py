"""The justification of every patch in one table, for teams that must give one.

Rules for changed copies of vLLM, InferenceX's for instance, ask of each patch its name, its
reason, a link to upstream, and when it is removed. All of that is in the patches' DEP-3 headers;
which features and fixes a patch serves follows from what it calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlay.patches import Patch, header_fields
from overlay.source import Overlay

from review.merging import title
from review.pieces import code, counted, escape, one_line, row, table
from review.vocabulary import Vocabulary
from review.words import Seams

#: What stands for the words of a patch that all of them need.
FRAME = "needed by all"
#: Of a header: no issue, and a patch that upstream has no use for.
_NO_BUG, _NOT_NEEDED = "none", "not-needed"
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
        f"vLLM {pin.release} by {counted(len(patches), 'patch', 'patches')}. "
        "`VLLM_READINESS=off` runs upstream's code everywhere, `VLLM_READINESS=-WORD` without one "
        "feature or fix; `make revert` restores upstream's files, byte for byte.",
    ]
    columns = list(COLUMNS)
    rows = [_cells(patch, vocabulary, seams) for patch in patches]
    if review is not None:
        version = review["release"]["version"]
        columns.append(f"on vLLM {version}")
        judged = {patch["name"]: patch for patch in review["patches"]}
        for patch, cells in zip(patches, rows, strict=True):
            verdict = judged[patch.name]
            cells.append(f"{verdict['verdict']}: {escape(verdict['because'])}")
        lines.append(f"The last column is `make review RELEASE={version}`, {review['date']}.")
    return "\n\n".join([*lines, table("", columns, [row(*cells) for cells in rows])]) + "\n"


def _cells(patch: Patch, vocabulary: Vocabulary, seams: Seams) -> list[str]:
    fields = header_fields(patch.header)
    _, _, reason = fields["Description"].partition("\n")
    words = seams.of_patch(patch.name)
    kinds = [
        f"{kind} {', '.join(map(code, sorted(served)))}"
        for kind, served in (
            ("features", words & vocabulary.features),
            ("fixes", words & vocabulary.fixes),
        )
        if served
    ]
    return [
        f"{patch.name[:4]} {escape(title(patch))}",
        escape(one_line(reason)),
        "; ".join(kinds) or FRAME,
        ", ".join(code(file.path, in_table=True) for file in patch.files),
        _upstream(fields),
        escape(one_line(fields["Drop-When"])),
    ]


def _upstream(fields: Mapping[str, str]) -> str:
    """Return the link to upstream, and what has been sent there."""
    bug, forwarded = fields["Bug"], fields["Forwarded"]
    link = "no issue" if bug == _NO_BUG else f"<{bug}>"
    if forwarded == _NOT_NEEDED:
        return f"{link}; of no use there"
    return f"{link}; {'not sent there' if forwarded == 'no' else f'sent: {escape(forwarded)}'}"
