"""A review as Markdown: a report for a pull request, and the whole document behind the page."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, ndiff
from typing import Any

from review.page import CONTEXT

#: The contents of review.json, or a part of them.
Review = Mapping[str, Any]

#: GitHub refuses a comment of more than 65,536 characters.
LIMIT = 60_000
#: In the report, a single text longer than this is cut, and so are the users of a name.
_LONGEST, _USERS = 600, 3
#: In changed blocks with more pairs of lines than this, no similar lines are looked for.
_PAIRS = 2500

_VERDICTS = {
    "clean": "nothing here needs a decision.",
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
_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]|^\d+(?=[.)])")


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
        part = _section(f"## {heading}" if heading else "", columns, kept)
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
    for heading, anchor, columns, lines in _sections(review, None):
        parts.append(_section(_heading(2, anchor, heading) if heading else "", columns, lines))
        same = [_name(name, None) for name in review["names"] if name["fate"] == "same"]
        if same and columns == _NAME_COLUMNS:
            summary = f"{_counted(len(same), 'name')} unchanged"
            parts.append(_folded(summary, _section("", columns, same)))
    if review["patches"]:
        parts.append(_heading(2, "patches", "Patches"))
    for patch in review["patches"]:
        parts += _patch(review, patch)
    if texts:
        parts.append(_heading(2, "files", "Files"))
    for path, file in texts.items():
        parts += _file(review, path, file)
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
        _counted(verdicts[word], f"patch {one}", f"patches {more}")
        for word, (one, more) in _PATCHES.items()
        if verdicts[word]
    ]
    yield f"# {escape(title(review))}"
    yield (
        f"**{escape(verdict)}**: {_VERDICTS.get(verdict, '')} "
        f"{', '.join(counts) or 'There are no patches'}."
    )
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
        patches.append(_line(link, f"**{escape(patch['verdict'])}**", escape(patch["because"])))
    yield "", "", ("patch", "verdict", "why"), patches
    if review["warnings"]:
        warnings = [f"- {escape(warning)}" for warning in review["warnings"]]
        yield _counted(len(warnings), "warning"), "warnings", (), warnings
    if fixes := review["fixes"]:
        count = sum(fix["has"] == "mended" for fix in fixes)
        heading = f"Fixes: {count:,} of {len(fixes):,} can go"
        yield heading, "fixes", _FIX_COLUMNS, [_fix(fix, most_users is None) for fix in fixes]
    if review["names"]:
        changed = [name for name in review["names"] if name["fate"] != "same"]
        changed.sort(key=lambda name: not name["certain"])
        total = _counted(len(review["names"]), "name")
        heading = f"Names that changed: {len(changed):,} of {total} that the overlay uses"
        yield heading, "names", _NAME_COLUMNS, [_name(name, most_users) for name in changed]
    if review["targets"] and not review["own"]:
        lines = [
            _line(
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
    return _line(
        code(fix["name"], True),
        f"**{escape(fix['has'])}**: {escape(fix['because'])}",
        escape(", ".join(fix["bugs"])),
        ", ".join(patches) or "none of its own",
        escape(fix["todo"]),
    )


def _patch_name(name: str, linked: bool) -> str:
    span = code(name, True)
    return f"[{span}](#{_anchor(name)})" if linked else span


def _name(name: Review, most_users: int | None) -> str:
    changed = " changed" * (name["fate"] in ("signature", "body"))
    fate = f"**{escape(name['fate'])}{changed}**"
    if not name["certain"]:
        fate += " (found by its name alone)"
    where = code(name["was"], True)
    if name["now"] not in (None, name["was"]):
        where += f", now {code(name['now'], True)}"
    users = [code(user, True) for user in name["users"][:most_users]]
    if more := len(name["users"]) - len(users):
        users.append(f"and {more:,} more")
    return _line(
        f"{code(name['name'], True)} {escape(name['kind'])}",
        fate,
        escape(name["detail"]),
        where,
        f"{escape(', '.join(name['how']))} by {', '.join(users)}",
    )


# Sections of the document alone


def _patch(review: Review, patch: Review) -> Iterator[str]:
    anchor = _anchor(patch["name"])
    yield _heading(3, anchor, f"{code(patch['name'])} **{escape(patch['verdict'])}**")
    yield f"**{escape(patch['title'])}**: {escape(patch['because'])}"
    yield "\n".join(
        # Of an address only this form becomes a link.
        f"- {escape(field)}: {f'<{value}>' if _ADDRESS.fullmatch(value) else escape(value)}"
        for field, value in patch["header"].items()
    )
    for nth, file in enumerate(patch["files"], 1):
        hunks = [
            _hunk(review, hunk, f"{anchor}-file-{nth}-hunk-{number}")
            for number, hunk in enumerate(file["hunks"], 1)
        ]
        summary = f"{file['path']}: {file['verdict']}, {_counted(len(hunks), 'hunk')}"
        body = "\n\n".join([*hunks, f"[The whole file](#{_anchor(file['path'])})"])
        # A file to which the patch applies as it is needs no look.
        yield _folded(summary, body, unfolded=file["verdict"] != "applies")


def _hunk(review: Review, hunk: Review, anchor: str) -> str:
    base, version = review["base"]["release"], review["release"]["version"]
    where = f"line {hunk['was']} of {base}"
    if not review["own"]:
        now = "nowhere in" if hunk["now"] is None else f"{hunk['now']} of"
        where += f", {now} {version}"
    inside = f" in {code(hunk['function'])}" if hunk["function"] else ""
    sides = [(f"{base}, overlaid", hunk["ours"])]
    if hunk["verdict"] == "conflicts" or hunk["theirs"]:
        sides.append((version, hunk["theirs"]))
    return "\n\n".join(
        (
            _heading(4, anchor, f"**{escape(hunk['verdict'])}** {escape(where)}{inside}"),
            *(diff((base, hunk["base"]), side, numbered=False) for side in sides),
        )
    )


def _file(review: Review, path: str, file: FileTexts) -> Iterator[str]:
    base, version = review["base"]["release"], review["release"]["version"]
    yield _heading(3, _anchor(path), code(path))
    if review["own"] or file.candidate is None:
        if not review["own"]:
            yield (
                "A patch conflicts here, so there is no candidate. "
                f"This is the overlay on its own release, {escape(base)}."
            )
        yield diff((base, _lines(file.base)), (f"{base}, overlaid", _lines(file.overlaid)))
    else:
        candidate = (f"{version}, candidate", _lines(file.candidate))
        yield diff((version, _lines(file.release)), candidate)
    for target in review["targets"] if not review["own"] else ():
        if target["path"] == path:
            functions = target["functions"]
            changes = (f"{code(item['name'])} {escape(item['fate'])}" for item in functions)
            before, after = (base, _lines(file.base)), (version, _lines(file.release))
            yield _folded(
                f"Upstream's own drift: {_counted(target['added'], 'line')} added, "
                f"{target['removed']:,} removed, {_counted(len(functions), 'function')} touched",
                f"{', '.join(changes)}\n\n{diff(before, after, context=CONTEXT)}",
            )


def _candidate(review: Review) -> Iterator[str]:
    candidate = review["candidate"]
    rebase = re.sub(r"^make review\b", "make rebase", review["command"])
    version = escape(review["release"]["version"])
    yield _heading(2, "candidate", "Candidate")
    yield f"The series for {version}. {code(rebase)} lays it out in build/edit."
    labels = {"patches": "patches", "vendored": "merged cleanly", "conflicts": "conflicts"}
    lines = [
        f"- {label}: {', '.join(map(code, candidate[key])) or 'none'}"
        for key, label in labels.items()
    ]
    pin = "written" if candidate["pin"] else "not written until the conflicts are resolved"
    yield "\n".join([*lines, f"- VERSION_PIN: {pin}"])


# Diffs


def diff(
    before: tuple[str, Sequence[str]],
    after: tuple[str, Sequence[str]],
    numbered: bool = True,
    context: int | None = None,
) -> str:
    """A fenced unified diff in which similar lines follow one another.

    Args:
        before: the name of the text on the left, and its lines.
        after: the same on the right.
        numbered: whether hunks have a header.
        context: the number of unchanged lines around each change; None for all.
    """
    (old_name, left), (new_name, right) = before, after
    lines = [f"--- {_one_line(old_name)}", f"+++ {_one_line(new_name)}"]
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for group in matcher.get_grouped_opcodes(len(left) if context is None else context):
        _, first, _, start, _ = group[0]
        lines += [f"@@ -{first + 1} +{start + 1} @@"] if numbered else []
        for tag, i, i_end, j, j_end in group:
            old, new = left[i:i_end], right[j:j_end]
            if tag == "equal":
                lines += (f" {line}" for line in old)
            elif tag == "replace" and len(old) * len(new) <= _PAIRS:
                lines += (line[0] + line[2:] for line in ndiff(old, new) if line[0] != "?")
            else:
                lines += (f"-{line}" for line in old)
                lines += (f"+{line}" for line in new)
    if len(lines) == 2:
        return "No line differs."
    longest = max(len(run) for line in lines for run in re.findall("~*", line))
    fence = "~" * max(longest + 1, 3)
    return "\n".join([f"{fence}diff", *lines, fence])


def _lines(text: str) -> list[str]:
    """The lines of a text, split at line feeds only."""
    return text.removesuffix("\n").split("\n") if text else []


# Pieces of Markdown


def _anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)


def _heading(level: int, anchor: str, text: str) -> str:
    return f'{"#" * level} <a id="{anchor}"></a>{text} [#](#{anchor})'


def _section(heading: str, columns: Sequence[str], lines: Sequence[str]) -> str:
    head = [heading, ""] if heading else []
    if columns and lines:
        head += [_line(*columns), _line(*("---" for _ in columns))]
    return "\n".join([*head, *lines]).rstrip()


def _folded(summary: str, body: str, unfolded: bool = False) -> str:
    text = html.escape(_one_line(summary))
    return f"<details{' open' * unfolded}>\n<summary>{text}</summary>\n\n{body}\n\n</details>"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _counted(number: int, singular: str, plural: str = "") -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def escape(text: str) -> str:
    """Text that Markdown shows unchanged, on one line, without mentions or links."""
    escaped = _MARKUP.sub(_escaped, _one_line(text))
    # GitHub links @name and #1 even where they are escaped.
    escaped = re.sub(r"@(?=\w)", "@<!-- -->", escaped)
    return re.sub(r"\\#(?=\d)", r"\\#<!-- -->", escaped)


def _escaped(match: re.Match[str]) -> str:
    # After a number that would begin a list, the backslash comes behind it.
    return match[0] + "\\" if match[0].isdigit() else "\\" + match[0]


def code(text: str, in_table: bool = False) -> str:
    """Text as a code span on one line, with bars escaped in a table."""
    line = _one_line(text)
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    padded = f" {line} " if line.startswith("`") or line.endswith("`") else line
    span = f"{fence}{padded or ' '}{fence}"
    return span.replace("|", "\\|") if in_table else span


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _shortened(content: Any) -> Any:  # noqa: ANN401 (of JSON)
    """The same contents with every long text cut."""
    if isinstance(content, dict):
        return {key: _shortened(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_shortened(value) for value in content]
    if isinstance(content, str) and len(content) > _LONGEST:
        return content[: _LONGEST - 1] + "…"
    return content
