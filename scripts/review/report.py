"""The report of a review, in Markdown: conflicts, then decisions, then the rest, folded."""

from __future__ import annotations

import datetime
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from review import runners, watch, words
from review.merging import JudgedPatch
from review.model import unified
from review.watch import Change

if TYPE_CHECKING:
    from review.verdict import Review

_WATCHED = {
    watch.MIRRORED: "We re-implement",
    watch.SEAM: "A patch stands in",
    watch.IMPORTED: "Our modules use",
}
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]")


def markdown(review: Review) -> str:
    """Return the report."""
    release, pin = review.release, review.overlay.pin
    parts = [
        f"# vLLM {escape(release.version)} for overlay {escape(pin.overlay)}",
        f"**{escape(review.headline)}.**",
        f"The overlay is for vLLM {escape(pin.release)}. This was read in {code(release.wheel)}, "
        f"SHA-256 {code(release.sha256)} ({escape(release.proof)}), on {datetime.date.today()}. "
        "A definition that is not on the watch list may have changed unseen.",
        *_conflicts(review.conflicts),
        *_decisions(review),
        *_runners(review),
        *_words(review),
    ]
    if review.tried:
        rows = [(each.name, f"**{each.outcome}**", escape(each.detail)) for each in review.tried]
        parts += ["## Tried", _table(("step", "outcome", "detail"), rows)]
    text = "\n\n".join([*parts, *_rest(review)])
    return (
        "".join(c if c.isprintable() or c in "\t\n" else f"<U+{ord(c):04X}>" for c in text) + "\n"
    )


def _conflicts(patches: Sequence[JudgedPatch]) -> Iterator[str]:
    if patches:
        yield f"## Patches that conflict: {len(patches):,}"
    for judged in patches:
        yield f"### {judged.number} {escape(judged.title)}"
        for path, conflict in judged.conflicts:
            yield f"{code(path)}, {escape(judged.because)}:"
            yield _fenced(conflict.splitlines(), "python")


def _decisions(review: Review) -> Iterator[str]:
    changes = {k: [e for e in review.changes if e.kind == k] for k in watch.DECIDE}
    if number := len(review.decisions) + sum(map(len, changes.values())):
        yield f"## Needs a decision: {number:,}"
    if review.decisions:
        yield "\n".join(f"- {escape(each)}" for each in review.decisions)
    for kind, found in changes.items():
        if found:
            yield f"### {_WATCHED[kind]}: {len(found):,} changed"
            yield from map(_change, found)


def _runners(review: Review) -> Iterator[str]:
    (_, before), (place, after) = review.runners
    if not (before or after):
        return
    base, version = review.overlay.pin.release, review.release.version
    yield "## Which model runner serves"
    if not after:
        yield escape(f"{version} has no {runners.PROPERTY}. Find what decides there.")
        return
    yield (
        f"{code(runners.PROPERTY)} decides, at {code(place)}, and "
        f"{code(f'{runners.VARIABLE}=0')} selects V1."
    )
    old, new = "\n\n".join(before), "\n\n".join(after)
    if diff := unified(old, new):
        yield _folded(f"The source, {base} to {version}", _fenced(diff, "diff"))
    yield _folded(f"The whole source in {version}", _fenced(new.split("\n"), "python"))


def _words(review: Review) -> Iterator[str]:
    if not review.words:
        return
    counts = Counter(word.state for word in review.words)
    listed = ", ".join(f"{number} {state}" for state, number in counts.items())
    yield f"## Features and fixes: {listed}"
    if switch := words.switch(review.words):
        yield f"All that can be carried over: {code(f'VLLM_READINESS={switch}')}"
    yield _table(
        ("name", "state", "serves", "because"),
        [
            (
                *(code(word.name), f"**{word.state}**"),
                "V1 and V2" if word.on_v2 else "V1",
                escape("; ".join(word.because)),
            )
            for word in review.words
        ],
    )


def _rest(review: Review) -> Iterator[str]:
    yield "## The rest"
    if used := [each for each in review.changes if each.kind == watch.IMPORTED]:
        title = f"{_WATCHED[watch.IMPORTED]}: {len(used):,} changed"
        yield _folded(title, "\n\n".join(map(_change, used)))
    patches = review.merged.patches
    counts = Counter(sorted(each.verdict for each in patches))
    rows = [
        (f"{p.number} {escape(p.title)}", f"**{p.verdict}**", escape(p.because)) for p in patches
    ]
    title = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    yield _folded(f"Patches: {title}", _table(("patch", "verdict", "because"), rows))


def _change(change: Change) -> str:
    before, after = change.places
    fate = "changed" if after else "gone"
    place = f"{code(before or '')} and {code(after)}" if after else code(before or "")
    body = [f"For {escape(', '.join(change.users))}. In {place}."]
    body += [_fenced(change.diff, "diff")] if change.diff else []
    return _folded(f"{change.name}: {fate}", "\n\n".join(body))


# Pieces of Markdown that show any text unchanged


def _fenced(lines: Sequence[str], language: str) -> str:
    """Return lines that no reader of Markdown takes for markup."""
    longest = max((len(run) for line in lines for run in re.findall("~*", line)), default=0)
    fence = "~" * max(longest + 1, 3)
    return "\n".join([f"{fence}{language}", *lines, fence])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _folded(summary: str, body: str) -> str:
    text = html.escape(" ".join(summary.split()))
    return f"<details>\n<summary>{text}</summary>\n\n{body}\n\n</details>"


def escape(text: str) -> str:
    """Return text that Markdown shows unchanged, on one line."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def code(text: str) -> str:
    """Return text as a code span on one line, with bars escaped as tables need it, if it can be."""
    line = " ".join(text.split())
    return escape(text) if "`" in line or not line else f"`{line}`".replace("|", "\\|")
