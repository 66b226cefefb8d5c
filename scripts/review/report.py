"""The report of a review, in Markdown: conflicts, then decisions, then the rest, folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from review import model, runners, words
from review.markup import at, code, escape, fenced, folded, table, visible
from review.merging import JudgedHunk, JudgedPatch
from review.model import GONE, NEW, Change

if TYPE_CHECKING:
    from review.review import Review

_WATCHED = {
    model.MIRRORED: "We re-implement",
    model.SEAM: "A patch stands in",
    model.IMPORTED: "Our modules use",
    model.MAKER: "Makes, derives from or replaces a class with a seam",
    model.PATCHED: "Elsewhere in the files that we patch",
}


def markdown(review: Review) -> str:
    """Return the report."""
    base, release = review.overlay.pin.release, review.release
    parts = [
        f"# vLLM {escape(release.version)} for overlay {escape(review.overlay.pin.overlay)}",
        f"**{escape(review.headline)}.**",
        f"The overlay is for vLLM {escape(base)}. This was read in {code(release.wheel)}, SHA-256 "
        f"{code(release.sha256)} ({escape(release.proof)}), on {review.date}; "
        f"{code(release.command)} repeats it. "
        "A definition that is not on the watch list may have changed unseen.",
        *_conflicts(review),
        *_decisions(review),
        *_runners(review),
        *_words(review),
        *_tried(review),
        *_rest(review),
    ]
    return visible("\n\n".join(parts)) + "\n"


# Sections


def _conflicts(review: Review) -> Iterator[str]:
    if not review.conflicts:
        return
    yield f"## Patches that conflict: {len(review.conflicts):,}"
    for judged in review.conflicts:
        yield f"### {_named(judged)}"
        yield escape(f"{judged.because}.")
        for hunk in judged.hunks:
            if hunk.at is not None:
                yield _conflict(review, judged, hunk)


def _conflict(review: Review, judged: JudgedPatch, hunk: JudgedHunk) -> str:
    version, name = review.release.version, judged.patch.name.removesuffix(".patch")
    inside = f", in {code(hunk.function)}" if hunk.function else ""
    moved = f" The lines that it changes are at line {hunk.now} there." if hunk.now else ""
    return (
        f"{at(version, f'{hunk.path}:{hunk.at}')}{inside}.{moved} Git's merge is in "
        f"{code(f'candidate/conflicts/{name}/{hunk.path}')}.\n\n{fenced(hunk.conflict, 'python')}"
    )


def _decisions(review: Review) -> Iterator[str]:
    changes = [each for each in review.changes if each.kind in model.DECIDE]
    if not changes and not review.decisions:
        return
    number = len(changes) + len(review.decisions)
    yield f"## Needs a decision: {number:,}"
    if review.decisions:
        yield "\n".join(f"- {escape(each)}" for each in review.decisions)
    for kind in model.DECIDE:
        if found := [each for each in changes if each.kind == kind]:
            yield f"### {_WATCHED[kind]}: {len(found):,} changed"
            yield from (_change(review, each) for each in found)


def _runners(review: Review) -> Iterator[str]:
    before, after = review.runners.before, review.runners.after
    if before is None and after is None:
        return
    base, version = review.overlay.pin.release, review.release.version
    yield "## Which model runner serves"
    if after is None:
        yield escape(f"{version} has no {runners.PROPERTY}. Find what decides there.")
        return
    place = at(version, f"{after.path}:{after.line}")
    how = f"is{' not' * review.runners.changed} the same as in {base}"
    yield f"{code(runners.PROPERTY)} decides, at {place}. Its source {escape(how)}."
    alone = [word.name for word in review.words if not word.on_v2]
    if alone:
        yield (
            f"{len(alone):,} of {len(review.words) - 1:,} features and fixes serve Model Runner V1 "
            "alone, and do nothing for a model that V2 serves. "
            f"{code(f'{runners.VARIABLE}=0')} selects V1."
        )
    if review.runners.diff:
        yield folded(
            f"The source of the decision, {base} to {version}",
            fenced(review.runners.diff, "diff"),
        )
    yield folded(f"The whole decision of {version}", fenced(after.text.split("\n"), "python"))


def _words(review: Review) -> Iterator[str]:
    if not review.words:
        return
    every = [word for word in review.words if word.group != words.FRAME]
    counts = [
        f"{number} {'live' if state == words.LIVES else state}"
        for state in (words.LIVES, words.MENDED, words.LOST, words.CONFLICT)
        if (number := sum(word.state == state for word in every))
    ]
    yield f"## Features and fixes: {', '.join(counts)}"
    yield (
        "*lives*: its patches merge, the functions that they stand in exist, and the model runner "
        "that it serves is there. Each changed definition names our modules that use it. "
        "*mended*: the release has it. *gone*: its patches change nothing in the release, or "
        "the release lacks its model runner."
    )
    if switch := words.switch(review.words):
        yield f"All that can be carried over: {code(f'VLLM_READINESS={switch}')}"
    rows = [
        [
            code(word.name),
            word.group,
            f"**{word.state}**",
            "V1 and V2" if word.on_v2 else "V1",
            escape("; ".join(word.because)),
        ]
        for word in review.words
    ]
    yield table(("name", "kind", "state", "serves", "because"), rows)


def _tried(review: Review) -> Iterator[str]:
    if review.tried:
        yield "## Tried"
        yield table(
            ("step", "outcome", "detail"),
            [[each.name, f"**{each.outcome}**", escape(each.detail)] for each in review.tried],
        )


def _rest(review: Review) -> Iterator[str]:
    yield "## The rest"
    for kind, text in _WATCHED.items():
        found = [each for each in review.changes if each.kind == kind]
        if kind in model.DECIDE or not found:
            continue
        if kind == model.PATCHED:
            body = "\n".join(f"- {code(each.name)} ({each.fate})" for each in found)
        else:
            body = "\n\n".join(_change(review, each) for each in found)
        yield folded(f"{text}: {len(found):,} changed", body)
    patches = review.merged.patches
    counts = Counter(sorted(each.verdict for each in patches))
    yield folded(
        f"Patches: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}",
        table(
            ("patch", "verdict", "because"),
            [[_named(each), f"**{each.verdict}**", escape(each.because)] for each in patches],
        ),
    )
    if review.mends:
        rows = [
            [code(f.name), f.state, escape(f.because), escape(f.todo)]
            for f in review.mends.values()
        ]
        yield folded("Fixes and upstream", table(("fix", "upstream", "known", "to do"), rows))
    if review.asked:
        rows = [[escape(e.name), escape(e.was), escape(e.now)] for e in review.asked]
        yield folded(
            f"The release asks for other distributions: {len(rows):,}",
            table(("distribution", "was", "is now"), rows),
        )


# Parts


def _change(review: Review, change: Change) -> str:
    base, version = review.overlay.pin.release, review.release.version
    places = [
        f"{escape(release)}: {at(release, place)}"
        for release, place in zip((base, version), change.places, strict=True)
        if place is not None
    ]
    fate = change.fate if change.fate in (GONE, NEW, "moved") else f"{change.fate} changed"
    users = f" For {escape(', '.join(change.users))}." if change.users else ""
    body = [f"{escape(change.detail)}{users} {', '.join(places)}.".strip()]
    if change.diff:
        body.append(fenced(change.diff, "diff"))
    return folded(f"{change.name}: {fate}", "\n\n".join(body))


def _named(judged: JudgedPatch) -> str:
    return f"{judged.number} {escape(judged.title)}"
