"""A review as Markdown: a report for a pull request, and the whole document behind the page."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from review import conflicts, entries, reach, sections, sources, verdicts, warned
from review.findings import places
from review.page import CONTEXT
from review.pieces import (
    anchor_of,
    code,
    counted,
    diff,
    escape,
    folded,
    headed,
    lines_of,
    one_line,
    row,
    table,
)

#: The contents of review.json, or a part of them.
Review = Mapping[str, Any]

#: GitHub refuses a comment of more than 65,536 characters.
LIMIT = 60_000
#: In the report, a single text longer than this is cut, and so are the users of a name.
_LONGEST, _USERS = 600, 3

_VERDICTS = {
    "unchanged": "all {proven}.",
    "needs eyes": "everything merges, and something below must be looked at first.",
    "conflicts": "something does not merge, and needs its author.",
}
_PATCHES = {
    "applies": ("applies as it is", "apply as they are"),
    "moved": ("applies moved", "apply moved"),
    "conflicts": ("conflicts", "conflict"),
    "obsolete": ("is obsolete", "are obsolete"),
}

_ADDRESS = re.compile(r"https://[^\s<>]+")


@dataclass(frozen=True)
class FileTexts:
    """The four texts of a file that the patches change.

    Attributes:
        base: that of the overlay's own release, pristine.
        release: that of the release under review.
        overlaid: base with the patches.
        candidate: release with the rebased patches; None if they conflict.
    """

    base: str
    release: str
    overlaid: str
    candidate: str | None


def title(review: Review) -> str:
    """The subject of the review."""
    base = review["base"]
    if review["own"]:
        return f"Overlay {base['overlay']} on vLLM {base['release']}"
    return f"vLLM {review['release']['version']} for overlay {base['overlay']}"


def report(review: Review) -> str:
    """The review for a pull request, at most :data:`LIMIT` characters; it counts what it omits."""
    review = _shortened(review)
    parts = list(_head(review))
    room = LIMIT - sum(len(part) + 2 for part in parts)
    for heading, _, columns, lines in _sections(review, _USERS):
        # Each section may fill half of the remaining room, so that there is some for the last.
        left = room // 2
        kept = [line for line in lines if (left := left - len(line) - 1) >= 0]
        part = table(f"## {heading}" if heading else "", columns, kept)
        if number := len(lines) - len(kept):
            part += f"\n\n{number:,} more are in the page and in review.json."
        parts.append(part)
        room -= len(part) + 2
    parts.append(f"Made by {code(review['command'])} on {escape(review['date'])}.")
    return "\n\n".join(parts) + "\n"


def document(review: Review, texts: Mapping[str, FileTexts]) -> str:
    """The whole review, with links between its sections and every diff.

    Args:
        review: the contents of ``review.json``.
        texts: the texts of each file that the patches change, by its path.
    """
    parts = list(_head(review))
    shown = entries.entries(review)
    where = entries.anchors(shown)
    for heading, anchor, columns, lines in _sections(review, None):
        title = headed(2, anchor, heading) if heading else ""
        if anchor in entries.SECTIONS:
            found = [*entries.of_section(shown, anchor)]
            parts += [title, *entries.folds(found, review, where)]
        elif anchor == "warnings":
            parts.append(table(title, columns, warned.lines(review, shown, where)))
        else:
            parts.append(table(title, columns, lines))
        if anchor == "names":
            same = [_name(name, review, None) for name in review["names"] if name["fate"] == "same"]
            if same:
                summary = f"{counted(len(same), 'name')} unchanged"
                parts.append(folded(summary, table("", _NAME_COLUMNS, same)))
    if review["patches"]:
        parts.append(headed(2, "patches", "Patches"))
    parts += [_patch(review, patch) for patch in review["patches"]]
    if texts:
        parts.append(headed(2, "files", "Files"))
    parts += [_file(review, path, file) for path, file in texts.items()]
    if review["candidate"] and not review["own"]:
        parts += _candidate(review)
    parts.append(f"Made by {code(review['command'])} on {escape(review['date'])}.")
    return "\n\n".join(parts) + "\n"


# Sections that the report and the document have in common

_NAME_COLUMNS = ("name", "fate", "what", "where", "users")
_FIX_COLUMNS = ("fix", "in the release", "upstream", "patch", "what to do")


def _head(review: Review) -> Iterator[str]:
    release, verdict = review["release"], review["verdict"]
    verdicts = Counter(patch["verdict"] for patch in review["patches"])
    counts = [
        counted(verdicts[word], f"patch {one}", f"patches {more}")
        for word, (one, more) in _PATCHES.items()
        if verdicts[word]
    ]
    yield f"# {escape(title(review))}"
    meaning = _VERDICTS.get(verdict, "").format(proven=escape(review["proven"]))
    yield f"**{escape(verdict)}**: {meaning} {', '.join(counts) or 'There are no patches'}."
    if review["summary"]:
        yield "\n".join(f"- {escape(sentence)}" for sentence in review["summary"])
    yield (
        f"{code(release['wheel'])}, SHA-256 {code(release['sha256'])}, "
        f"proven by {escape(release['proof'])}."
    )


def _sections(
    review: Review, most_users: int | None
) -> Iterator[tuple[str, str, Sequence[str], list[str]]]:
    """Heading, anchor, the columns of a table (none for a list), and the lines of each section.

    Args:
        review: the contents of ``review.json``.
        most_users: the number of users of a name that are listed; None for the whole document,
            in which the patches are links.
    """
    patches = []
    for patch in review["patches"]:
        link = _patch_name(patch["name"], most_users is None)
        patches.append(row(link, f"**{escape(patch['verdict'])}**", escape(patch["because"])))
    yield "", "", ("patch", "verdict", "why"), patches
    if most_users is not None and (lines := conflicts.report(review)):
        yield f"{counted(len(lines), 'conflict')}", "conflicts", (), lines
    if review["warnings"]:
        warnings = [f"- {escape(warning)}" for warning in review["warnings"]]
        yield counted(len(warnings), "warning"), "warnings", (), warnings
    for heading, anchor, columns, rows in (
        verdicts.section(review["words"]),
        reach.section(review["classes"]),
    ):
        if rows:
            lines = [row(*map(escape, cells)) for cells in rows]
            if most_users is None and anchor == "words":  # a matrix of releases leads to each word
                names = (word["name"] for word in review["words"])
                lines = [
                    line.replace("| ", f'| <a id="{verdicts.anchor(name)}"></a>', 1)
                    for name, line in zip(names, lines, strict=True)
                ]
            yield heading, anchor, columns, lines
    yield from sections.of_findings(review)
    if fixes := review["fixes"]:
        count = sum(fix["has"] == "mended" for fix in fixes)
        heading = f"Fixes: {count:,} of {len(fixes):,} can go"
        yield heading, "fixes", _FIX_COLUMNS, [_fix(fix, most_users is None) for fix in fixes]
    if review["names"]:
        changed = [name for name in review["names"] if name["fate"] != "same"]
        changed.sort(key=lambda name: not name["certain"])
        total = counted(len(review["names"]), "name")
        heading = f"Names that changed: {len(changed):,} of {total} that the overlay uses"
        yield heading, "names", _NAME_COLUMNS, [_name(name, review, most_users) for name in changed]
    yield from sources.sections(review)
    if review["targets"] and not review["own"]:
        lines = [
            row(
                code(target["path"], True),
                f"{target['added']:,}",
                f"{target['removed']:,}",
                f"{len(target['functions']):,}",
            )
            for target in review["targets"]
        ]
        columns = ("file", "lines added", "lines removed", "functions touched")
        yield "Upstream's own drift", "drift", columns, lines


def _fix(fix: Review, linked: bool) -> str:
    patches = [
        f"{_patch_name(patch['name'], linked)} {escape(patch['verdict'])}"
        for patch in fix["patches"]
    ]
    return row(
        code(fix["name"], True),
        f"**{escape(fix['has'])}**: {escape(fix['because'])}",
        escape(", ".join(fix["bugs"])),
        ", ".join(patches) or "none of its own",
        escape(fix["todo"]),
    )


def _patch_name(name: str, linked: bool) -> str:
    span = code(name, True)
    return f"[{span}](#{anchor_of(name)})" if linked else span


def _name(name: Review, review: Review, most_users: int | None) -> str:
    changed = " changed" * (name["fate"] in ("signature", "body"))
    fate = f"**{escape(name['fate'])}{changed}**"
    if not name["certain"]:
        fate += " (found by its name alone)"
    versions = review["base"]["release"], review["release"]["version"]
    was = None if name["fate"] == "same" else name["was"]  # one place is enough
    where = places(versions, was, name["now"])
    users = [code(user, True) for user in name["users"][:most_users]]
    if more := len(name["users"]) - len(users):
        users.append(f"and {more:,} more")
    return row(
        f"{code(name['name'], True)} {escape(name['kind'])}",
        fate,
        escape(name["detail"]),
        where,
        f"{escape(', '.join(name['how']))} by {', '.join(users)}",
    )


# Sections of the document alone


def described(text: str) -> str:
    """A DEP-3 Description on one line: its first line is a title, and ends a sentence."""
    first, _, rest = (part.strip() for part in text.partition("\n"))
    end = "" if not rest or first.endswith((".", ":", "?", "!")) else "."
    return one_line(f"{first}{end} {rest}")


def _patch(review: Review, patch: Review) -> str:
    anchor = anchor_of(patch["name"])
    fields = dict(patch["header"])
    if text := fields.get("Description"):
        fields["Description"] = described(text)
    header = "\n".join(
        # Of an address only this form becomes a link.
        f"- {escape(field)}: {f'<{value}>' if _ADDRESS.fullmatch(value) else escape(value)}"
        for field, value in fields.items()
    )
    parts = [
        f'<a id="{anchor}"></a>**{escape(patch["title"])}**: {escape(patch["because"])}',
        header,
    ]
    fighting: list[str] = []
    rest: list[str] = []
    for nth, file in enumerate(patch["files"], 1):
        link = f"[{code(file['path'])}](#{anchor_of(file['path'])})"
        hunks = [f"**{escape(file['verdict'])}** {counted(len(file['hunks']), 'hunk')} in {link}"]
        for number, hunk in enumerate(file["hunks"], 1):
            text = _hunk(review, patch, file, hunk, f"{anchor}-file-{nth}-hunk-{number}")
            (fighting if hunk["verdict"] == "conflicts" else hunks).append(text)
        rest.append("\n\n".join(hunks))
    if fighting:  # what merges would hide them
        rest = [folded("the other hunks", "\n\n".join(rest))]
    summary = f"{patch['name']}: {patch['verdict']}, {patch['because']}"
    # A patch that applies as it is needs no look, and one that has moved was merged by git.
    unfolded = patch["verdict"] in ("conflicts", "obsolete")
    return folded(summary, "\n\n".join([*parts, *fighting, *rest]), unfolded)


def _hunk(review: Review, patch: Review, file: Review, hunk: Review, anchor: str) -> str:
    base, version = review["base"]["release"], review["release"]["version"]
    where = f"line {hunk['was']} of {base}"
    if not review["own"]:
        line = hunk["conflict"]["at"] if hunk["conflict"] else hunk["now"]
        now = "nowhere in" if line is None else f"{line} of"
        where += f", {now} {version}"
    inside = f" in {code(hunk['function'])}" if hunk["function"] else ""
    parts = [headed(4, anchor, f"**{escape(hunk['verdict'])}** {escape(where)}{inside}")]
    if hunk["conflict"]:
        return "\n\n".join([*parts, *conflicts.document(review, patch, file, hunk)])
    return "\n\n".join(
        [*parts, diff((base, hunk["base"]), (f"{base}, overlaid", hunk["ours"]), numbered=False)]
    )


def _file(review: Review, path: str, file: FileTexts) -> str:
    base, version = review["base"]["release"], review["release"]["version"]
    anchor = f'<a id="{anchor_of(path)}"></a>'
    parts = [f"{anchor}{code(path)}"]
    if review["own"] or file.candidate is None:
        if not review["own"]:
            parts[0] += (
                ": a patch conflicts here, so there is no candidate. "
                f"This is the overlay on its own release, {escape(base)}."
            )
        sides = (base, lines_of(file.base)), (f"{base}, overlaid", lines_of(file.overlaid))
    else:
        sides = (
            (version, lines_of(file.release)),
            (f"{version}, candidate", lines_of(file.candidate)),
        )
    parts.append(diff(*sides))
    for target in review["targets"] if not review["own"] else ():
        if target["path"] == path:
            functions = target["functions"]
            changes = (f"{code(item['name'])} {escape(item['fate'])}" for item in functions)
            before, after = (base, lines_of(file.base)), (version, lines_of(file.release))
            drift = folded(
                f"Upstream's own drift: {counted(target['added'], 'line')} added, "
                f"{target['removed']:,} removed, {counted(len(functions), 'function')} touched",
                f"{', '.join(changes)}\n\n{diff(before, after, context=CONTEXT)}",
            )
            parts.append(drift)
    return folded(path, "\n\n".join(parts))


def _candidate(review: Review) -> Iterator[str]:
    candidate = review["candidate"]
    rebase = re.sub(r"^make review\b", "make rebase", review["command"])
    version = escape(review["release"]["version"])
    yield headed(2, "candidate", "Candidate")
    yield f"The series for {version}. {code(rebase)} lays it out in build/edit."
    labels = {"patches": "patches", "vendored": "merged cleanly", "conflicts": "conflicts"}
    lines = [
        f"- {label}: {', '.join(map(code, candidate[key])) or 'none'}"
        for key, label in labels.items()
    ]
    pin = "written" if candidate["pin"] else "not written until what is wrong is resolved"
    yield "\n".join([*lines, f"- VERSION_PIN: {pin}"])


def _shortened(content: Any) -> Any:  # noqa: ANN401 (of JSON)
    """The same contents with every long text cut."""
    if isinstance(content, dict):
        return {key: _shortened(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_shortened(value) for value in content]
    if isinstance(content, str) and len(content) > _LONGEST:
        return content[: _LONGEST - 1] + "…"
    return content
