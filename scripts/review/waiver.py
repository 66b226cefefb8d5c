"""The justification of every patch in one table, for teams that must give one.

Rules for changed copies of vLLM, InferenceX's for instance, ask of each patch its name, its
reason, a link to upstream, and when it is removed. All of that is in the patches' DEP-3 headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from overlay.patches import Patch, header_fields
from overlay.source import Overlay

from review import words
from review.markup import code, counted, escape, one_line, table
from review.mends import NOT_MENDED
from review.merging import APPLIES, CONFLICTS, MOVED, OBSOLETE, title
from review.words import Vocabulary

if TYPE_CHECKING:
    from review.review import Review

#: What stands for the words of a patch that all of them need, and of one for the probe.
FRAME = "needed by all"
#: Of a header: no issue, and a patch that upstream has no use for.
_NO_BUG, _NOT_NEEDED = "none", "not-needed"
#: Verdict to what a person does about it.
_MEANING = {
    APPLIES: "at the same lines",
    MOVED: "at other lines",
    CONFLICTS: "a person resolves it first",
    OBSOLETE: "it can go",
}
_COLUMNS = ("patch", "reason", "features and fixes", "files", "upstream", "removed when")


def markdown(overlay: Overlay, vocabulary: Vocabulary, review: Review | None) -> str:
    """Return the table, with a paragraph above it.

    Args:
        overlay: the overlay.
        vocabulary: of its modules.
        review: of the release whose verdicts are shown; None for no verdicts.
    """
    pin, patches = overlay.pin, overlay.series.patches
    lines = [
        f"vllm-readiness-overlay {pin.overlay} changes {counted(len(overlay.targets), 'file')} of "
        f"vLLM {pin.release} by {counted(len(patches), 'patch', 'patches')}, and adds "
        f"{counted(len(overlay.added), 'file')} of its own. "
        "`VLLM_READINESS=off` runs upstream's code everywhere, `VLLM_READINESS=-WORD` without one "
        "feature or fix; `make revert` restores upstream's files, byte for byte.",
    ]
    columns = list(_COLUMNS)
    rows = [_cells(patch, overlay, vocabulary) for patch in patches]
    if review is not None:
        version = review.release.version
        columns.append(f"on vLLM {version}")
        counts = Counter(judged.verdict for judged in review.merged.patches)
        verdicts = [f"{counts[word]} {word} ({text})" for word, text in _MEANING.items()]
        lines.append(
            f"The last column says whether each patch applies to vLLM {version} "
            f"(`make review RELEASE={version}`, {review.date}): {', '.join(verdicts)}."
        )
        for judged, cells in zip(review.merged.patches, rows, strict=True):
            parts = [f"{judged.verdict}: {escape(judged.because)}"]
            cells.append("; ".join([*parts, *_mended(judged.number, review)]))
    return "\n\n".join([*lines, table(columns, rows)]) + "\n"


def _mended(number: str, review: Review) -> Iterator[str]:
    """Yield what the release has of each fix that the patch is of, unless it has nothing."""
    for fix in review.mends.values():
        if fix.state != NOT_MENDED and any(own.number == number for own in fix.patches):
            yield f"{code(fix.name)} is {fix.state} ({escape(fix.because)}): {escape(fix.todo)}"


def _cells(patch: Patch, overlay: Overlay, vocabulary: Vocabulary) -> list[str]:
    fields = header_fields(patch.header)
    _, _, reason = fields["Description"].partition("\n")
    return [
        f"{patch.name[:4]} {escape(title(patch))}",
        escape(one_line(reason)),
        _served(patch, vocabulary),
        _files(patch, overlay),
        _upstream(fields),
        escape(one_line(fields["Drop-When"])),
    ]


def _served(patch: Patch, vocabulary: Vocabulary) -> str:
    """Return the features and fixes that need the patch."""
    served = words.of_patch(patch)
    kinds = [
        f"{kind} {', '.join(map(code, sorted(served & names)))}"
        for kind, names in (("features", vocabulary.features), ("fixes", vocabulary.fixes))
        if served & names
    ]
    return "; ".join(kinds) or FRAME


def _files(patch: Patch, overlay: Overlay) -> str:
    """Return the paths of the changed files, unless it is every one that the overlay changes."""
    if len(patch.files) == len(overlay.targets):
        return f"all {len(overlay.targets)}, which the other rows name"
    return ", ".join(code(file.path) for file in patch.files)


def _upstream(fields: Mapping[str, str]) -> str:
    """Return the link to upstream, and what has been sent there."""
    bug, forwarded = fields["Bug"], fields["Forwarded"]
    link = "no issue" if bug == _NO_BUG else f"<{bug}>"
    if forwarded == _NOT_NEEDED:
        return f"{link}; nothing to send there"
    return f"{link}; {'not sent there' if forwarded == 'no' else f'sent: {escape(forwarded)}'}"
