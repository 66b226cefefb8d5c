"""A review as Markdown, for a pull request or the summary of a CI run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from review import phrases
from review.phrases import Review

#: GitHub refuses a comment of more than 65,536 characters.
LIMIT = 60_000
#: A single text longer than this is cut.
_LONGEST = 600
#: Users of a name that are listed.
_USERS = 3

_MARKUP = re.compile(r"[\\`*_\[\]<>#|~$&]|^[-+=]|^\d+(?=[.)])")


def render(review: Review) -> str:
    """The review as Markdown, at most :data:`LIMIT` characters; omitted lines are counted."""
    release = review["release"]
    parts = [
        f"# {escape(phrases.title(review))}",
        f"**{escape(phrases.verdict(review))}** {escape(phrases.patches(review))}",
        f"{code(release['wheel'])}, SHA-256 {code(release['sha256'])}, "
        f"proven by {escape(release['proof'])}.",
    ]
    room = LIMIT - sum(len(part) + 2 for part in parts)
    for heading, columns, lines in _sections(review):
        # Each section may fill half of the remaining room, so that there is some for the last.
        part = _section(heading, columns, lines, room // 2)
        parts += [part] if part else []
        room -= len(part) + 2
    parts.append(f"Made by {code(review['command'])} on {escape(review['date'])}.")
    return "\n\n".join(parts) + "\n"


def _sections(review: Review) -> Iterable[tuple[str, Sequence[str], list[str]]]:
    """Headings, the columns of their tables (none for a list), and the lines."""
    yield (
        "",
        ("patch", "verdict", "why"),
        [
            _line(code(patch["name"], True), escape(patch["verdict"]), escape(patch["because"]))
            for patch in review["patches"]
        ],
    )
    if review["warnings"]:
        warnings = [f"- {escape(warning)}" for warning in review["warnings"]]
        yield phrases.counted(len(warnings), "warning"), (), warnings
    if review["names"]:
        names = [_name(name) for name in phrases.changed(review)]
        total = phrases.counted(len(review["names"]), "name")
        heading = f"Names that changed: {len(names):,} of {total} that the overlay uses"
        yield heading, ("name", "fate", "what", "users"), names
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
        yield "Upstream's own drift", columns, lines


def _name(name: Review) -> str:
    fate = str(phrases.FATES.get(name["fate"], name["fate"]))
    if not name["certain"]:
        fate += " (found by its name alone)"
    users = [code(user, True) for user in name["users"][:_USERS]]
    if more := len(name["users"]) - _USERS:
        users += [f"and {more:,} more"] if more > 0 else []
    detail = escape(name["detail"])
    return _line(code(name["name"], True), escape(fate), detail, ", ".join(users))


def _section(heading: str, columns: Sequence[str], lines: Sequence[str], room: int) -> str:
    head = [f"## {heading}", ""] if heading else []
    if columns and lines:
        head += [_line(*columns), _line(*("---" for _ in columns))]
    kept: list[str] = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    left = len(lines) - len(kept)
    foot = ["", f"{left:,} more are in the page and in review.json."] if left else []
    return "\n".join([*head, *kept, *foot]).rstrip()


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
