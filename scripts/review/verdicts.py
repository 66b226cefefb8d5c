"""A verdict on each feature and fix: what a maintainer can move to a release, and what not.

It follows from the verdicts on patches, the fates of names, and what other parts of the review
report of our modules and seams. docs/features.md explains the words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from review.definitions import module_name
from review.fixes import MENDED
from review.merging import ADOPTED, CONFLICTS, GONE, OBSOLETE, JudgedPatch
from review.outline import enclosing
from review.pieces import anchor_of
from review.references import Place, References
from review.runners import V1, V2, VARIABLE, brief, joined
from review.selecting import OTHER
from review.vocabulary import Vocabulary
from review.words import Seams

#: The verdicts, the worst first.
CANNOT, EYES, DROPPABLE, HOLDS = "cannot hold", "needs eyes", "droppable", "holds"
#: The groups of words, and what all share: the switch, the log line, the base of features.
FEATURES, FIXES, FRAME = "features", "fixes", "frame"

_VARIABLE = "VLLM_READINESS"
#: The reasons that a table shows of one word.
_SHOWN = 4


@dataclass
class _Entry:
    conflicts: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def examine(
    vocabulary: Vocabulary,
    seams: Seams,
    patches: Sequence[JudgedPatch],
    names: Iterable[Mapping[str, Any]],
    fixes: Iterable[Mapping[str, Any]],
    dead: Sequence[str] = (),
    alive: Iterable[str] = (),
    more: Iterable[tuple[str, str]] = (),
) -> list[dict[str, Any]]:
    """Judge each feature and fix.

    Args:
        vocabulary: of our modules.
        seams: of the patches.
        patches: judged.
        names: the entries under "names" in review.json.
        fixes: the entries under "fixes".
        dead: the models that the release takes from Model Runner V1.
        alive: the words that run without V1 (:func:`without_v1`).
        more: reasons to look, each with the module of ours, the place in a patched file
            (``path:line``) or the word that it concerns.

    Returns:
        The entries under "words" in review.json, in the order of ``registry.py``; the last one
        is for what every word needs.
    """
    words = [*sorted(vocabulary.features), *sorted(vocabulary.fixes)]
    if not words:
        return []
    entries = {word: _Entry() for word in (*words, FRAME)}
    for patch in patches:
        _judge_patch(entries, seams, patch)
    concerns = [*_changed(names), *more]
    for concern, reason in concerns:
        for word in _concerned(vocabulary, seams, concern) or {FRAME}:
            if reason not in entries[word].reasons:
                entries[word].reasons.append(reason)
    has = {fix["name"]: fix for fix in fixes}
    for word, needs in vocabulary.needs.items():
        broken = sorted(need for need in needs if entries[need].conflicts)
        entries[word].conflicts += [f"needs {need}" for need in broken]
    listed, running = list(dead), set(alive)
    judged = []
    for word, entry in entries.items():
        fix = has.get(word)
        mended = fix is not None and fix["has"] == MENDED
        verdict = CANNOT if entry.conflicts else EYES if entry.reasons else HOLDS
        if mended:
            verdict = DROPPABLE
        reasons = list(entry.reasons)
        if mended and fix is not None:
            reasons.insert(0, f"the release has it {fix['because']}")
        judged.append(
            {
                "name": word,
                "group": _group(vocabulary, word),
                "verdict": verdict,
                "conflicts": entry.conflicts,
                "because": reasons,
                "dead": [] if word in running or word == FRAME else listed,
            }
        )
    return judged


def warnings(findings: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A warning for what every feature and fix needs; all others are warned of elsewhere."""
    for finding in findings:
        if finding["group"] == FRAME and finding["verdict"] == CANNOT:
            yield f"nothing holds before this is resolved: {', '.join(finding['conflicts'])}"


def section(
    findings: Sequence[Mapping[str, Any]],
) -> tuple[str, str, Sequence[str], list[list[str]]]:
    """Heading, anchor, columns and the cells of the table."""
    rows = []
    for finding in findings:
        reasons = [*finding["conflicts"], *finding["because"]]
        because = reasons[:_SHOWN]
        if more := len(reasons) - len(because):
            because.append(f"and {more} more")
        verdict = finding["verdict"]
        if finding["dead"]:
            verdict += f"; dead on {brief(finding['dead'])}"
        rows.append([_called(finding), finding["group"], verdict, "; ".join(because)])
    counted = [finding for finding in findings if finding["group"] != FRAME]
    held = sum(finding["verdict"] == HOLDS and not finding["dead"] for finding in counted)
    heading = f"Features and fixes: {held:,} of {len(counted):,} hold as they are"
    return heading, "words", ("word", "group", "verdict", "why"), rows


def anchor(word: str) -> str:
    """Where the page of a review has the verdict on a word."""
    return anchor_of(f"word-{word}")


def switch(findings: Iterable[Mapping[str, Any]]) -> str | None:
    """The value of ``VLLM_READINESS`` that leaves out what cannot hold; None if nothing is."""
    off = [f"-{f['name']}" for f in findings if f["verdict"] == CANNOT and f["group"] != FRAME]
    return ",".join(off) or None


def sentences(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What can be moved to the release, for people."""
    if not findings:
        return
    frame = next((f for f in findings if f["group"] == FRAME), None)
    if frame is not None and frame["conflicts"]:
        yield f"resolve first, for every feature and fix: {', '.join(frame['conflicts'])}"
    value = switch(findings)
    if value is None:
        yield "every feature and fix can be carried over"
    else:
        names = ", ".join(word.removeprefix("-") for word in value.split(","))
        yield f"all but {names}: {_VARIABLE}={value}"
    if looked := [f["name"] for f in findings if f["verdict"] == EYES and f["group"] != FRAME]:
        yield f"to be read first: {', '.join(looked)}"
    if gone := [f["name"] for f in findings if f["verdict"] == DROPPABLE]:
        yield f"the release has these fixes, and they can be dropped: {', '.join(gone)}"
    features = [f for f in findings if f["group"] == FEATURES]
    if models := next((f["dead"] for f in features if f["dead"]), None):
        alive = [f["name"] for f in features if not f["dead"]]
        served = "every model" if OTHER in models else joined(models)
        yield (
            f"on {served} what the overlay does in Model Runner V1 does nothing by default: of "
            f"the features only {', '.join(alive) or 'none'} still do something; "
            f"{VARIABLE}=0 brings V1 back"
        )


def of_classes(
    classes: Iterable[Mapping[str, Any]], seams: Seams, overlaid: Mapping[str, bytes]
) -> Iterator[tuple[str, str]]:
    """The places of the seams that a change of the classes that run concerns, with the reason.

    Args:
        classes: the entries under "classes" in review.json.
        seams: of the patches.
        overlaid: the patched files.
    """
    holders: dict[str, list[str]] = {}
    for path, line, _ in seams.lines():
        name = f"{module_name(path)}.{enclosing(overlaid[path], line)}".rstrip(".")
        holders.setdefault(name, []).append(f"{path}:{line}")
    for finding in classes:
        for name in finding["seams"] if finding["new"] else ():
            for place in holders.get(name, ()):
                yield place, finding["detail"]


def without_v1(seams: Seams, base: References, paths: Mapping[str, bytes]) -> set[str]:
    """The words that have a seam which Model Runner V1 is not needed for.

    Args:
        seams: of the patches.
        base: the references of the release that the overlay is for.
        paths: the patched files.
    """
    only = _only_v1(base, paths)
    return {word for path, line, words in seams.lines() for word in words if path not in only}


def _only_v1(base: References, paths: Iterable[str]) -> set[str]:
    """The patched files whose classes Model Runner V1 makes, directly or not, and V2 does not."""
    reached: dict[Place, set[str]] = {V1: {V1[0]}, V2: {V2[0]}}
    for runner, modules in reached.items():
        new = {runner[0]}
        while new:
            imports = {origin for name in new for origin in _imported(base, name)}
            new = {name for name in map(module_name, paths) if name in imports} - modules
            modules.update(new)
    alone = reached[V1] - reached[V2]
    return {path for path in paths if module_name(path) in alone and _is_runners(path)}


def _imported(base: References, name: str) -> set[str]:
    module = base.definitions.module(name)
    return {origin for origin, _ in module.imports.values()} if module else set()


def _is_runners(path: str) -> bool:
    return path.startswith(("vllm/v1/worker/", "vllm/v1/sample/"))


def _judge_patch(entries: Mapping[str, _Entry], seams: Seams, patch: JudgedPatch) -> None:
    number = patch.patch.name.partition("-")[0]
    words = seams.of_patch(patch.patch.name) or {FRAME}
    for file in patch.files:
        for hunk in file.hunks:
            if hunk.verdict == CONFLICTS or (hunk.verdict == GONE and patch.verdict == CONFLICTS):
                for word in words:
                    _add(entries[word].conflicts, f"conflict in {number}")
            elif hunk.verdict in (ADOPTED, GONE):
                what = "is obsolete" if patch.verdict == OBSOLETE else "is obsolete in part"
                for word in words:
                    _add(entries[word].reasons, f"{number} {what}")
            elif hunk.release_function not in ("", hunk.function):
                for word in words:
                    reason = f"{number} merges into {hunk.release_function}"
                    _add(entries[word].reasons, reason)
    if patch.verdict == CONFLICTS and not any(
        f"conflict in {number}" in entry.conflicts for entry in entries.values()
    ):  # Its hunks merge one by one, and not together.
        for word in words:
            _add(entries[word].conflicts, f"conflict in {number}")


def _changed(names: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each user of a name that has changed, with the reason."""
    for name in names:
        if name["fate"] == "same":
            continue
        short = name["name"].rpartition("vllm.")[2]
        changed = " changed" if name["fate"] in ("body", "signature") else ""
        for user in name["users"]:
            yield user, f"{short}: {name['fate']}{changed}"


def _concerned(vocabulary: Vocabulary, seams: Seams, concern: str) -> set[str]:
    """The words of a word, a module, or a place with or without a line."""
    if concern in vocabulary.all:
        return {concern}
    path, _, line = concern.split(" ", maxsplit=1)[0].partition(":")
    at = int(line) if line.isdigit() else 0
    if "/readiness/" not in path and at:
        return set(seams.at(path, at))
    return set(vocabulary.of_module(path))


def _add(texts: list[str], text: str) -> None:
    if text not in texts:
        texts.append(text)


def _group(vocabulary: Vocabulary, word: str) -> str:
    if word == FRAME:
        return FRAME
    return FEATURES if word in vocabulary.features else FIXES


def _called(finding: Mapping[str, Any]) -> str:
    return "what all share" if finding["group"] == FRAME else str(finding["name"])
